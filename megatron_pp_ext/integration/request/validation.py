"""What the flags mean in Megatron's own terms.

Everything that can be known to be wrong is refused here, before any process group exists, with
the value, the rule and the fix in one line.
"""

import functools
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_pp_ext.files import require_writable
from megatron_pp_ext.integration import requested
from megatron_pp_ext.integration.hooks.checkpoint_placement import describe
from megatron_pp_ext.integration.request import layer_cut, profile_steps, sources, updates
from megatron_pp_ext.integration.request.refusals import refuse_unsupported
from megatron_pp_ext.integration.runners import layer_profiler, rehearsing
from megatron_pp_ext.request.layers import spread
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.placement import Placement, Shape


def translate_flags(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Say the schedule in Megatron's terms, then let stock validate.

    Seam: ``validate_args`` in ``megatron.training.arguments``, which runs before any process
    group is made.  A refused command line ends the process with one line.
    """

    @functools.wraps(stock)
    def validate_args(args: Namespace, defaults: dict[str, Any] = {}) -> Any:  # noqa: B006
        try:
            pipeline = read_flags(args)
        except ValueError as error:
            raise SystemExit(f"megatron_pp_ext: {error}") from error
        result = stock(args, defaults)
        # Megatron saves its flags in every checkpoint; see `checkpoints`.
        args.pipeline_placement = describe(pipeline.placement) if pipeline and pipeline.source else None
        requested.activate(pipeline)
        return result

    return validate_args


def refuse_yaml(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a schedule beside --yaml-cfg, under which Megatron ignores all other flags.

    Seam: ``validate_yaml`` in ``megatron.training.yaml_arguments``.
    """

    @functools.wraps(stock)
    def validate_yaml(args: Namespace, defaults: dict[str, Any] = {}) -> Any:  # noqa: B006
        flags = (
            "--pipeline-schedule",
            "--pipeline-trace",
            "--pipeline-profile-steps",
            "--profile-pipeline",
            "--rehearse-pipeline",
        )
        ours = [word for word in sys.argv if word.startswith(flags)]
        if ours:
            raise SystemExit(
                f"megatron_pp_ext: {ours[0]} has no effect beside --yaml-cfg, under which Megatron ignores "
                "other flags; give all settings as flags"
            )
        return stock(args, defaults)

    return validate_yaml


def read_flags(args: Namespace) -> requested.Pipeline | None:
    """The pipeline that ``args`` ask for, None if nothing of ours; ValueError if it cannot be.

    For a V, and for ``interleaved`` where the user left it open, sets
    ``args.num_virtual_stages_per_pipeline_rank``, from which Megatron derives the rest.
    """
    ranks = args.pipeline_model_parallel_size
    chunks = _chunks_asked_for(args)
    layer_profiler.refuse_flags(args)
    if args.pipeline_trace is not None:
        require_writable("--pipeline-trace", args.pipeline_trace)
    rehearsing.refuse_flags(args)
    if args.pipeline_schedule is None and args.rehearse_pipeline is not None:
        args.pipeline_schedule = "1f1b" if chunks in (None, 1) else "interleaved"
    measured_steps = profile_steps.read(args)
    if args.pipeline_schedule is None:
        if args.pipeline_trace is None and args.profile_pipeline is None:
            return None
        if args.pipeline_trace is not None:
            _require_pipeline("--pipeline-trace", ranks)
        shape = Shape.LINEAR if chunks in (None, 1) else Shape.LOOP
        placement = Placement(shape, ranks, chunks or 1)
        return requested.Pipeline(None, placement, args.pipeline_trace, profile=args.profile_pipeline)

    try:
        source = _read_source(args, chunks)
    except OSError as error:
        raise ValueError(f"--pipeline-schedule {args.pipeline_schedule}: {error}") from error
    refuse_unsupported(args, source.placement, source.splits_backward or measured_steps is not None)
    _require_filled(args, source.name, source.placement.stages)
    if source.name not in updates.NAMES:
        updates.refuse_flags(args)
        pipeline = requested.Pipeline(
            source, source.placement, args.pipeline_trace, profile_steps=measured_steps
        )
        if args.rehearse_pipeline is None:
            return pipeline
        by_stage = tuple(layer_cut.by_stage(args, source.placement.stages))
        # A rank without data learns from global rank 0, which is not there, that there is some to train on.
        args.do_train = True
        return replace(pipeline, rehearsal=args.rehearse_pipeline, layers=by_stage)
    never_flushes = updates.read(args, _microbatches(args))
    return requested.Pipeline(source, source.placement, args.pipeline_trace, never_flushes)


def _read_source(args: Namespace, chunks: int | None) -> sources.Source:
    """Where schedules come from; tells Megatron how many chunks a rank that makes."""
    name, ranks = args.pipeline_schedule, args.pipeline_model_parallel_size
    is_compiled = name in ("flex", "auto")
    for flag, value in (
        ("--pipeline-memory-limit", args.pipeline_memory_limit if name != "flex" else None),
        ("--pipeline-costs", args.pipeline_costs if not is_compiled else None),
    ):
        if value is not None:
            raise ValueError(
                f"{flag} {value} has no meaning for --pipeline-schedule {name}; leave it out, or choose flex"
            )
    if is_compiled:
        _require_pipeline(f"--pipeline-schedule {name}", ranks)
        return _read_compiled(args, chunks)
    if name.startswith(sources.CSV_PREFIX):
        _require_pipeline(f"--pipeline-schedule {name}", ranks)
        first_first = args.transformer_impl == "transformer_engine"
        source = sources.from_file(Path(name.removeprefix(sources.CSV_PREFIX)), ranks, first_first)
        _settle_chunks(args, name, source.placement.chunks, any_chunks=False, asked=chunks)
        _microbatches(args)
        return source
    if name in updates.NAMES:
        _require_pipeline(f"--pipeline-schedule {name}", ranks)
        _settle_chunks(args, name, 1, any_chunks=False, asked=chunks)
        return sources.never_flushing(name, ranks)
    try:
        entry = catalog.entry(name)
    except ValueError as error:
        raise ValueError(f"--pipeline-schedule: {error}") from error
    _require_pipeline(f"--pipeline-schedule {name}", ranks)
    chunks = _settle_chunks(args, entry.name, entry.chunks, entry.any_chunks, chunks)
    _microbatches(args)
    return sources.from_catalogue(entry.name, Placement(entry.shape, ranks, chunks))


def _read_compiled(args: Namespace, chunks: int | None) -> sources.Source:
    """``flex`` or ``auto``: the compiler chooses among the cuts that the layers allow."""
    name, ranks = args.pipeline_schedule, args.pipeline_model_parallel_size
    if name == "flex" and args.pipeline_memory_limit is None:
        raise ValueError(
            "--pipeline-schedule flex needs --pipeline-memory-limit; give a fraction of 1F1B's peak on its "
            "first rank, such as 0.5, or a number of bytes, or choose auto"
        )
    if name == "auto" and args.fp16 and args.loss_scale is None:
        raise ValueError(
            "--pipeline-schedule auto measures what memory is free after the first update, and the dynamic "
            "loss scale of --fp16 skips the first ones; use --bf16, set --loss-scale, or choose flex"
        )
    if chunks is None:
        can_halve = not layer_cut.has_given_ends(args) and not layer_cut.pattern(args)
        chunks = 2 if can_halve and spread(args) % (2 * ranks) == 0 else 1
    _require_filled(args, name, chunks * ranks)
    microbatches = _microbatches(args)
    source = sources.compiled(args, chunks, microbatches, sources.candidate_placements(args, chunks))
    if layer_cut.stages_asked_for(args) is None:
        chosen = source.placement.chunks
        args.num_layers_per_virtual_pipeline_stage = None
        args.num_virtual_stages_per_pipeline_rank = chosen if chosen > 1 else None
    return source


def _require_pipeline(flag: str, ranks: int) -> None:
    if ranks < 2:
        raise ValueError(
            f"{flag} needs a pipeline of 2 ranks or more, got --pipeline-model-parallel-size {ranks}; "
            "set it to 2 or more, or leave the flag out"
        )


def _chunks_asked_for(args: Namespace) -> int | None:
    """How many chunks a rank stock's flags ask for; None if they leave it open."""
    ranks = args.pipeline_model_parallel_size
    stages = layer_cut.stages_asked_for(args)
    if stages is not None:
        if stages % ranks:
            raise ValueError(
                f"{_stages_flag(args)} has {stages} stages, which {ranks} pipeline ranks cannot "
                f"share evenly; give it {ranks} or {2 * ranks} stages"
            )
        return stages // ranks
    if args.num_virtual_stages_per_pipeline_rank is not None:
        return int(args.num_virtual_stages_per_pipeline_rank)
    if args.num_layers_per_virtual_pipeline_stage is not None:
        return max(1, spread(args) // (ranks * args.num_layers_per_virtual_pipeline_stage))
    return None


def _settle_chunks(args: Namespace, name: str, chunks: int, any_chunks: bool, asked: int | None) -> int:
    """The chunks a rank will have: ``chunks``, or if ``any_chunks`` as many more as stock's flags ask for.

    ValueError where stock's flags and the schedule disagree.
    """
    stages = chunks * args.pipeline_model_parallel_size
    if asked is None:
        letters = layer_cut.pattern(args)
        if letters and chunks > 1:
            raise ValueError(
                f"--pipeline-schedule {name} has {stages} stages, between which --hybrid-layer-pattern needs "
                f"a |; write it as {layer_cut.cut_evenly(letters, stages)}, for example"
            )
        if chunks > 1:
            args.num_virtual_stages_per_pipeline_rank = chunks
        return chunks
    fits = asked >= chunks if any_chunks else asked == chunks
    if fits:
        return asked
    if layer_cut.stages_asked_for(args) is not None:
        flag, fix = _stages_flag(args), f"give it {stages} stages"
    elif args.num_virtual_stages_per_pipeline_rank is not None:
        flag, fix = "--num-virtual-stages-per-pipeline-rank", f"set it to {chunks}"
    else:
        flag, fix = "--num-layers-per-virtual-pipeline-stage", "leave it out"
    at_least = " or more" if any_chunks else ""
    raise ValueError(
        f"--pipeline-schedule {name} has {chunks}{at_least} chunk(s) a rank, but {flag} asks for "
        f"{asked}; {fix}, or choose another schedule"
    )


def _stages_flag(args: Namespace) -> str:
    return "--hybrid-layer-pattern" if layer_cut.pattern(args) else "--pipeline-model-parallel-layout"


def _require_filled(args: Namespace, name: str, stages: int) -> None:
    """ValueError where the model's layers do not fill ``stages`` stages as Megatron would."""
    if not layer_cut.count(args):
        return
    try:
        layer_cut.by_stage(args, stages)
    except ValueError as error:
        raise ValueError(
            f"--pipeline-schedule {name} with --pipeline-model-parallel-size "
            f"{args.pipeline_model_parallel_size} has {stages} stages: {error}"
        ) from error


def _microbatches(args: Namespace) -> int:
    """The microbatches of an ordinary step; ValueError if there are none, which stock notices in the step.

    Where the batch grows, those of its last size: most steps have it.
    """
    batch, steps = args.global_batch_size, getattr(args, "step_batch_size_schedule", None)
    if batch is None and steps:
        batch = int(steps.rpartition(":")[2])
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    if batch is None or not args.micro_batch_size:
        return 1
    replicas = max(1, args.world_size // model)
    per_microbatch = args.micro_batch_size * replicas
    if batch < per_microbatch:
        raise ValueError(
            f"--global-batch-size {batch} makes 0 microbatches of --micro-batch-size "
            f"{args.micro_batch_size} on {replicas} data-parallel rank(s); set it to {per_microbatch} or more"
        )
    return int(batch // per_microbatch)
