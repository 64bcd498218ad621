"""The flags that a schedule cannot run with yet, each with the reason.

They are refused at start-up, since a run would otherwise train wrongly or without the schedule's effect.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from packaging.version import Version

from megatron_pp_ext.job import layers
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.placement import Placement

FIRST_ENGINE = "2.3"
"""The first Transformer Engine whose modules have a store (``WeightGradStore``, module/_common.py)."""


class Refusal(NamedTuple):
    """A flag that is refused: the reason, the fix, and a test where the flag's own value does not decide."""

    flag: str
    reason: str
    fix: str | Callable[[Namespace], str] = "leave one of the two out"
    test: Callable[[Namespace], object] | None = None

    def is_set(self, args: Namespace) -> bool:
        """Whether ``args`` set the flag, which some releases of Megatron lack."""
        return bool(self.test(args) if self.test else layers.value(args, self.flag))


def _captures_graphs(settings: Any) -> bool:
    return getattr(settings, "cuda_graph_impl", None) not in (None, "none")


def _evaluates_on_several(args: Namespace) -> bool:
    return bool(layers.value(args, "--multiple-validation-sets"))


def _batches_messages(args: Namespace) -> bool:
    return not getattr(args, "overlap_p2p_comm", True)


def _changes_order(args: Namespace) -> bool:
    can = catalog.abilities(args.pipeline_schedule)
    return can.measures_memory or args.pipeline_profile_steps is not None


def gathers_weights(args: Namespace, kind: str = "") -> bool:
    """Whether weights are cut into more parts than tensor-parallel ranks, and gathered for each use.

    ``kind`` is "expert_" for those of experts.
    """
    shards = getattr(args, f"{kind}tensor_parallel_num_weight_shards", None) or 0
    ranks = (args.expert_tensor_parallel_size if kind else None) or args.tensor_model_parallel_size
    return bool(shards > ranks)


_GRAPHS = "graphs are captured in stock's order of microbatches"
_GATHERED = "a weight that is gathered for each use has no gradient to leave for later"

ALWAYS = (
    Refusal("--use-megatron-fsdp", "FSDP reduces gradients by its own hooks"),
    Refusal("--use-torch-fsdp2", "FSDP reduces gradients by its own hooks"),
    Refusal("--delay-wgrad-compute", "schedules split the backward themselves"),
    Refusal("--cuda-graph-impl", _GRAPHS, test=_captures_graphs),
    # Two older names, which Megatron turns into the first.
    Refusal("--enable-cuda-graph", _GRAPHS),
    Refusal("--external-cuda-graph", _GRAPHS),
    Refusal("--hybrid-context-parallel", "its microbatches differ from rank to rank"),
    # How stock's own schedules take microbatches and send messages.
    Refusal(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "it orders the microbatches of Megatron's own interleaved schedule alone",
        "leave it out, or choose breadth-first, whose groups hold all microbatches",
        lambda args: getattr(args, "microbatch_group_size_per_vp_stage", None),
    ),
    Refusal(
        "--overlap-p2p-communication-warmup-flush",
        "messages overlap computing throughout, in the warm-up and the flush too",
        "leave it out",
        lambda args: getattr(args, "overlap_p2p_comm_warmup_flush", None),
    ),
    Refusal(
        "--no-overlap-p2p-communication",
        "messages always overlap computing",
        "leave it out",
        _batches_messages,
    ),
    Refusal("--use-ring-exchange-p2p", "each message leaves as soon as it is ready", "leave it out"),
    Refusal(
        "--pipeline-model-parallel-comm-backend ucc",
        "messages go through groups of --distributed-backend",
        "leave it out",
        lambda args: getattr(args, "pipeline_model_parallel_comm_backend", None) == "ucc",
    ),
    Refusal("--fine-grained-activation-offloading", "it moves activations in stock's order of microbatches"),
    Refusal(
        "--moe-paged-stash",
        "it holds all steps to the order of its first one",
        "choose a schedule that stays as it is, such as 1f1b",
        lambda args: getattr(args, "moe_paged_stash", None) and _changes_order(args),
    ),
    Refusal("--defer-embedding-wgrad-compute", "schedules defer weight gradients themselves"),
    Refusal(
        "--overlap-param-gather-with-optimizer-step", "it splits the optimizer by stock's order of chunks"
    ),
    Refusal(
        "--full-validation",
        "Megatron fails at the first evaluation",
        "leave it out and set --eval-iters, or, on two ranks with one chunk each, add "
        "--multiple-validation-sets",
        lambda args: layers.value(args, "--full-validation") and not _evaluates_on_several(args),
    ),
    Refusal(
        "--multiple-validation-sets",
        "Megatron evaluates on several sets as a whole alone",
        "leave it out, or, on two ranks with one chunk each, add --full-validation",
        lambda args: _evaluates_on_several(args) and not layers.value(args, "--full-validation"),
    ),
)

SPLIT = (
    Refusal(
        "--tp-comm-overlap", "the buffers that it gathers into are used again before a weight gradient runs"
    ),
    Refusal(
        "--use-transformer-engine-op-fuser",
        "a dense MLP's operations compute both gradients at once, and experts' are not made before a forward",
    ),
    Refusal("--overlap-dispatch-backward-with-experts-wgrad", "schedules defer weight gradients themselves"),
    Refusal("--tensor-parallel-num-weight-shards", _GATHERED, test=gathers_weights),
    Refusal(
        "--expert-tensor-parallel-num-weight-shards",
        _GATHERED,
        test=partial(gathers_weights, kind="expert_"),
    ),
)


def unsplit_engine(version: str) -> Refusal:
    """Refuse layers of Transformer Engine ``version`` where that release cannot split their backward."""
    return Refusal(
        "--transformer-impl transformer_engine",
        f"layers of Transformer Engine {version} cannot leave their weight gradient for later",
        f"install transformer-engine {FIRST_ENGINE} or newer, or add --transformer-impl local",
        lambda args: (
            getattr(args, "transformer_impl", None) == "transformer_engine"
            and Version(version) < Version(FIRST_ENGINE)
        ),
    )


MIRRORED = tuple(
    Refusal(
        flag,
        "a V has both ends of the model on one rank",
        lambda args: f"say where they go: --pipeline-model-parallel-layout '{layers.as_v(args)}'",
    )
    for flag in layers.ENDS
)


BETWEEN_ENDS = (
    Refusal(
        "--multiple-validation-sets",
        "Megatron cannot count the samples of stages between the ends, nor those of several chunks a rank",
        "take two ranks and a schedule with one chunk a rank, or leave it and --full-validation out and set "
        "--eval-iters",
    ),
)


_CONFIG = {
    "num_microbatches_with_partial_activation_checkpoints": "it counts microbatches in stock's order",
}
"""Settings without a flag, which a script can only make in the model's config."""


def refuse_config(config: Any) -> None:
    """Raise ValueError for the first setting of the model's ``config`` that no schedule can run with."""
    unsupported = {name: reason for name, reason in _CONFIG.items() if getattr(config, name, None)}
    if _captures_graphs(config):
        unsupported["cuda_graph_impl"] = _GRAPHS
    for name, reason in unsupported.items():
        raise ValueError(f"--pipeline-schedule does not support {name} in the model's config: {reason}")


def refuse(args: Namespace, placement: Placement, splits_backward: bool, engine: str | None = None) -> None:
    """Raise ValueError for the first flag in ``args`` that the schedule cannot run with.

    ``engine`` is the version of Transformer Engine on the machine that trains; None where that is
    another machine.
    """
    refusals = list(ALWAYS)
    if splits_backward:
        refusals += SPLIT if engine is None else (unsplit_engine(engine), *SPLIT)
    if placement.is_mirrored(1):
        refusals += MIRRORED
    if placement.stages > 2:
        refusals += BETWEEN_ENDS
    refuse_first(args, refusals)


def can_predict(args: Namespace, placement: Placement) -> bool:
    """Whether ``args`` put multi-token prediction nowhere, or where Megatron can build and train it."""
    stage = layers.predicting_stage(args, placement.stages)
    return stage is None or stage in stages_for_prediction(placement)


def stages_for_prediction(placement: Placement) -> list[int]:
    """Return the stages where Megatron can build and train multi-token prediction.

    Megatron builds it in the last chunk of a rank (``MultiTokenPredictionBlock``).  On the first rank it sums
    the gradients of the first stage's embedding with other ranks' (``_allreduce_embedding_grad`` in
    ``megatron.core.distributed.finalize_model_grads``) and would leave out a copy in another of its stages.
    """
    stages = placement.stages
    return [
        stage
        for stage in range(stages - placement.ranks, stages)
        if placement.rank_of(stage) != 0 or stage in (0, stages - 1)
    ]


def refuse_prediction(args: Namespace, placement: Placement) -> None:
    """Raise ValueError unless ``can_predict``."""
    if not can_predict(args, placement):
        stage = layers.predicting_stage(args, placement.stages)
        can = stages_for_prediction(placement)
        raise ValueError(
            f"--pipeline-schedule {args.pipeline_schedule} does not support multi-token prediction (m) in "
            f"stage {stage}, counted from 0, of --pipeline-model-parallel-layout "
            f"{args.pipeline_model_parallel_layout}: it must be in a rank's last chunk, and on the first "
            f"rank beside the E or the L; put the m into stage {' or '.join(map(str, can))}"
        )


def refuse_first(args: Namespace, refusals: Iterable[Refusal], or_else: str = "", by: str = "") -> None:
    """Raise ValueError for the first of ``refusals`` that ``args`` set; ``or_else`` follows its fix.

    ``by`` is the flag that cannot do with it, by default the schedule's.
    """
    for refusal in refusals:
        if refusal.is_set(args):
            fix = refusal.fix if isinstance(refusal.fix, str) else refusal.fix(args)
            raise ValueError(
                f"{by or f'--pipeline-schedule {args.pipeline_schedule}'} does not support {refusal.flag}: "
                f"{refusal.reason}; {fix}{or_else}"
            )
