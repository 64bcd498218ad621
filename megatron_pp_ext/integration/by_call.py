"""``megatron_pp_ext.install``: schedules for any trainer on megatron.core, without flags.

The hooks of megatron.core are put in place by the first call.  What is installed applies to the models that
are built while it is: their chunks are placed by it, and their steps run by it whatever is installed later.
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_pp_ext.features.units.options import LengthsOf
from megatron_pp_ext.integration import patching, requested
from megatron_pp_ext.integration.call_request import GivenCosts, InForce, InstallCall, asked
from megatron_pp_ext.job.call_words import use_variables
from megatron_pp_ext.schedule.placement import LAST

_installed: tuple[InstallCall, requested.Pipeline, InForce] | None = None
"""What ``install`` has put in force."""

_kept: int | None = None
"""The names that were replaced already when the hooks were put in place; None while they are not."""


def install(
    schedule: str,
    *,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    memory_limit: float | str | None = None,
    costs: GivenCosts | None = None,
    vocabulary: str | None = None,
    trace: str | Path | None = None,
    timeout: float | timedelta | None = None,
    offload: float | str | None = None,
    slice_tokens: int | str | None = None,
    slice_check: str | None = None,
    loss_rank: str = LAST,
    order: str | None = None,
    lengths: LengthsOf | None = None,
    unproved: bool = False,
) -> InForce:
    """Run models of megatron.core that are built from now on by ``schedule``, and return a summary of it.

    Call it on every rank with the same arguments, before the model is built and best before its process
    groups are made.  ``schedule`` is a name of ``mpp list``, ``csv:FILE``, ``flex`` or ``auto``; those that
    never flush need Megatron's own loop.  ``ranks`` is the pipeline-parallel size, ``microbatches`` are those
    of an ordinary step: any step may have others.  ``chunks`` is the number of stages a rank, where the
    schedule leaves it open; the model's config has to have it as virtual_pipeline_model_parallel_size.
    ``memory_limit`` is that of ``flex``: a fraction of 1F1B's peak, or an amount in the unit of ``costs``.
    ``costs`` is a file, ``Costs``, or a number for each stage, which each F, I and W takes; without any,
    those of ``flex`` and ``auto`` follow from the model before its first step.  ``vocabulary`` is "shared" or
    "auto". ``trace`` is a file for the times of each step's actions.  ``timeout`` is how long a message may
    take, a timedelta or minutes (10).  ``offload`` lets activations wait on the host: a share of them, or
    "auto" for as many as cost no time, and for as few as keep ``memory_limit`` where there is one.
    ``slice_tokens`` cuts sequences into slices of so many tokens, which go through the pipeline one by one;
    "auto" chooses the number before the first step.  Before that the model is checked for operations along
    the sequence that slices do not know; ``slice_check="off"`` leaves that out.
    ``loss_rank`` is the pipeline rank with both ends of the model where a schedule has them on one, as a V
    does: "last", where other trainers look for the loss, or "first", as in the papers.

    ``order`` is "rule" or "search" for training steps whose microbatches have documents of unlike length:
    they are read ahead and run in an order planned by their lengths, and losses come back in the order of the
    data.  docs/lengths.md has the requirements for a loop.  Without it, as with "given", microbatches run in
    the order of the data, and nothing is read ahead or looked into; where their shapes vary, a line reports
    the gain of "rule".  ``lengths`` is a function from a batch of the data iterator to the lengths of its
    documents in tokens, for data that does not state them as Megatron's does.

    ``unproved`` permits what is built and was never run on a GPU: CUDA graphs under a schedule (docs/gpu.md).

    The same call again, with the same contents of its files, does nothing.  Another one replaces the
    schedule, unless a model was built for it.

    ValueError, in one line, for what cannot be.
    """
    global _installed
    call = asked(
        schedule,
        ranks=ranks,
        microbatches=microbatches,
        chunks=chunks,
        memory_limit=memory_limit,
        costs=costs,
        vocabulary=vocabulary,
        trace=trace,
        timeout=timeout,
        offload=offload,
        slice_tokens=slice_tokens,
        slice_check=slice_check,
        loss_rank=loss_rank,
        order=order,
        lengths=lengths,
        unproved=unproved,
    )
    if _installed is not None and call == _installed[0]:
        return _installed[2]
    pipeline, in_force = call.pipeline()
    _patch()
    if _installed is not None:
        _require_unused(_installed[1])
    requested.activate(pipeline)
    _installed = call, pipeline, in_force
    return in_force


def install_by_variables(variables: Mapping[str, str], **arguments: Any) -> None:
    """Call ``install`` for the environment: errors name its ``variables``, which are by argument."""
    use_variables(variables)
    install(**arguments)


@contextmanager
def installed(schedule: str, **about: Any) -> Iterator[InForce]:
    """Run the models that are built within the context by ``schedule``, and yield a summary of it.

    The arguments are those of ``install``.  Models that are built outside of it run by what is installed
    there, or by Megatron's own schedule.  Steps run by the schedule that their model was built for, in the
    context or outside of it.
    """
    pipeline, in_force = asked(schedule, **about).pipeline()
    _patch()
    with requested.using(pipeline):
        yield in_force


def uninstall() -> None:
    """Undo ``install``: put back all that was replaced in Megatron, and in modules that imported it by name.

    ValueError, in one line, while a model is left whose layers are not where stock's schedule expects them.
    """
    global _installed, _kept
    if _kept is None:
        return
    from megatron_pp_ext.integration.core import chunk_pipelines

    gc.collect()  # a model that is gone may be part of circles
    chunk_pipelines.forget()
    if _installed is not None:
        requested.activate(None)
    _installed = None
    patching.undo(_kept)
    _kept = None


def _patch() -> None:
    """Put the hooks of megatron.core in place, once; ValueError, in one line, where they do not fit."""
    global _kept
    flags = requested.pipeline()
    if flags is not None and not flags.is_per_model:
        raise ValueError(
            f"--pipeline-schedule {flags.name} is in force already; leave out the flag, or the call for "
            "another schedule"
        )
    if _kept is not None:
        return
    try:
        # This comes first: a Megatron that is too old or too new may not have what the hooks import.
        patching.require_known_release()
        from megatron_pp_ext.integration import core_hooks

        _kept = patching.applied()
        patching.apply(core_hooks.INSTALLED)
    except patching.HookError as error:
        _kept = None
        raise ValueError(f"megatron_pp_ext: {error}") from error


def _require_unused(pipeline: requested.Pipeline) -> None:
    from megatron_pp_ext.integration.core import chunk_pipelines

    gc.collect()
    chunks = chunk_pipelines.built_for(pipeline)
    if chunks:
        raise ValueError(
            f"{pipeline.name} is installed, and a model with {chunks} chunks on this rank was built for it; "
            "call megatron_pp_ext.install before the model is built, or delete the model first"
        )
