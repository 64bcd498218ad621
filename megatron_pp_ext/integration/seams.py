"""Every place where this package enters Megatron-LM, and the only place that patches it.

A seam is a name in a Megatron module, the parameters that its function is known to have, and
what to put in its place.  All seams are checked before the first is touched: a Megatron that has
moved one of them is refused whole and stays stock.  A replaced name is replaced wherever a
Megatron module has imported it, and everything can be undone.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

KNOWN_VERSIONS = ("0.19",)
"""Releases of megatron-core (their first two numbers) that the seams were tried on."""


class SeamError(RuntimeError):
    """Megatron does not look as expected; nothing was patched."""


@dataclass(frozen=True, slots=True)
class Seam:
    """One name to replace.

    ``parameters`` are those of the function, or of the class's ``forward`` where the name is an
    autograd function.  ``wrap`` takes what is there and returns what goes in its place.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    wrap: Callable[[Any], Any]
    why: str

    @property
    def path(self) -> str:
        """Where it is, as one would import it."""
        return f"{self.module}.{self.name}"

    def find(self) -> Any:
        """What is there now; SeamError unless it exists and has the parameters."""
        try:
            target = getattr(importlib.import_module(self.module), self.name)
        except (ImportError, AttributeError) as error:
            raise SeamError(f"{self.path} is not there ({error}); {_advice()}") from error
        function = getattr(target, "forward", target)
        found = tuple(inspect.signature(function).parameters)
        if found != self.parameters:
            raise SeamError(
                f"{self.path} takes ({', '.join(found)}) where ({', '.join(self.parameters)}) was known; "
                + _advice()
            )
        return target


def _advice() -> str:
    return (
        f"megatron-core is {megatron_version()}, known are {', '.join(f'{v}.x' for v in KNOWN_VERSIONS)}: "
        "install one of these, or run the script without megatron_pp_ext"
    )


def megatron_version() -> str:
    """The version of the Megatron that would be imported, a checkout's included."""
    try:
        return str(importlib.import_module("megatron.core").__version__)
    except (ImportError, AttributeError):
        return version("megatron-core")


def all_seams() -> tuple[Seam, ...]:
    """The seams, in the order in which a training run passes them."""
    from megatron_pp_ext.integration import arguments, forward_backward, linear, placement, trace

    return (
        Seam(
            "megatron.training.arguments",
            "add_megatron_arguments",
            ("parser",),
            arguments.add_flags,
            "the --pipeline-schedule flags",
        ),
        Seam(
            "megatron.training.arguments",
            "validate_args",
            ("args", "defaults"),
            arguments.translate_flags,
            "a schedule in Megatron's own terms, before Megatron checks them",
        ),
        Seam(
            "megatron.training.yaml_arguments",
            "validate_yaml",
            ("args", "defaults"),
            arguments.refuse_yaml,
            "no schedule without its flags translated",
        ),
        Seam(
            "megatron.core.parallel_state",
            "initialize_model_parallel",
            (
                "tensor_model_parallel_size",
                "pipeline_model_parallel_size",
                "virtual_pipeline_model_parallel_size",
                "pipeline_model_parallel_comm_backend",
                "use_sharp",
                "context_parallel_size",
                "hierarchical_context_parallel_sizes",
                "hybrid_context_parallel",
                "expert_model_parallel_size",
                "gtp_remat_size",
                "expert_gtp_remat_size",
                "num_distributed_optimizer_instances",
                "expert_tensor_parallel_size",
                "nccl_communicator_config_path",
                "distributed_timeout_minutes",
                "order",
                "get_embedding_ranks",
                "get_position_embedding_ranks",
                "create_gloo_process_groups",
                "high_priority_stream_groups",
                "sharp_enabled_group",
                "rank_offset",
                "local_world_size",
            ),
            placement.embed_on_first_rank,
            "under a V the first rank has both ends of the model",
        ),
        Seam(
            "megatron.training.models.dist_utils",
            "build_virtual_pipeline_stages",
            ("build_model_func", "pg_collection", "vp_size", "model_type"),
            placement.build_chunks_placed,
            "chunks of a V or wave from the other end",
        ),
        Seam(
            "megatron.training.training",
            "build_train_valid_test_data_iterators",
            ("build_train_valid_test_datasets_provider",),
            placement.provide_data_placed,
            "data for the stages that a V puts on this rank",
        ),
        Seam(
            "megatron.core.pipeline_parallel.schedules",
            "get_forward_backward_func",
            ("pp_size", "vp_size", "schedule_pg_collection"),
            forward_backward.choose_schedule,
            "the schedule itself",
        ),
        Seam(
            "megatron.core.pipeline_parallel.schedules",
            "forward_step",
            (
                "forward_step_func",
                "data_iterator",
                "model",
                "num_microbatches",
                "input_tensor",
                "forward_data_store",
                "config",
                "cp_group_size",
                "collect_non_loss_data",
                "checkpoint_activations_microbatch",
                "is_first_microbatch",
                "current_microbatch",
                "vp_stage",
                "is_last_stage",
            ),
            trace.record_forward,
            "--pipeline-trace of stock's schedules",
        ),
        Seam(
            "megatron.core.pipeline_parallel.schedules",
            "backward_step",
            ("input_tensor", "output_tensor", "output_tensor_grad", "config"),
            trace.record_backward,
            "--pipeline-trace of stock's schedules",
        ),
        Seam(
            "megatron.core.tensor_parallel.layers",
            "LinearWithGradAccumulationAndAsyncCommunication",
            (
                "ctx",
                "input",
                "weight",
                "bias",
                "gradient_accumulation_fusion",
                "allreduce_dgrad",
                "sequence_parallel",
                "grad_output_buffer",
                "wgrad_deferral_limit",
                "tp_group",
                "gtp_remat_size",
            ),
            linear.split_backward,
            "the backward in two halves",
        ),
        Seam(
            "megatron.core.distributed.finalize_model_grads",
            "_allreduce_word_embedding_grads",
            ("model", "config", "embd_group", "pp_group"),
            placement.sum_tied_gradients,
            "tied weights whose two copies are on one rank",
        ),
    )


_applied: list[tuple[Any, str, Any]] = []
"""(module, name, what was there) of every replaced name, in order."""


def apply(seams: tuple[Seam, ...] | None = None) -> None:
    """Replace all ``seams`` (by default every one), or none and raise SeamError.

    Doing it twice is doing it once.
    """
    if _applied:
        return
    found = [(seam, seam.find()) for seam in (all_seams() if seams is None else seams)]
    try:
        for seam, target in found:
            replacement = seam.wrap(target)
            for module, name in _holders(target):
                _applied.append((module, name, target))
                setattr(module, name, replacement)
    except BaseException:
        undo()
        raise


def undo() -> None:
    """Put back everything that ``apply`` replaced."""
    while _applied:
        module, name, target = _applied.pop()
        setattr(module, name, target)


def is_applied() -> bool:
    """Whether Megatron is patched at this moment."""
    return bool(_applied)


def _holders(target: Any) -> Iterator[tuple[Any, str]]:
    """The module-level names by which ``target`` is known in Megatron, importers' included."""
    for module_name, module in list(sys.modules.items()):
        if module_name == "megatron" or module_name.startswith("megatron."):
            for name, value in list(vars(module).items()):
                if value is target:
                    yield module, name
