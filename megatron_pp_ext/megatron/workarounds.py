"""Workarounds of Megatron's own defects, which any schedule meets, stock's among them."""

import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine

from megatron_pp_ext.around import bound
from megatron_pp_ext.megatron.patching import hook, hooks_of, substitute


class Workaround(NamedTuple):
    """One defect of Megatron's and what is put in its place.

    ``defect`` states under which flags what goes wrong.  ``releases`` are those that have the defect.
    ``test`` fails without the workaround as long as Megatron has the defect: to see whether it can go, take
    it out of ``WORKAROUNDS`` and run the test.  Its hooks follow it, unless other hooks of ours call it.
    """

    defect: str
    releases: str
    test: str


EVERY = "every release"


STAGE_DATA = Workaround(
    "attention within documents on every stage and every tensor-parallel rank",
    EVERY,
    "tests/megatron/test_short_documents.py::test_a_mask_for_the_ranks_between_the_ends",
)
"""Scripts of Megatron read a batch on the first and the last stage, and give the others none. But attention
within documents needs the documents' ends on every stage: without them, a stage between the two attends to
all earlier tokens. Each stage then reads its own copy of the batch, as the outer ones do.
"""

FLAGS = ("reset_attention_mask", "dataloader_inter_document_masking", "sft")
"""The arguments that keep attention within documents; some releases lack the second."""


def every_stage_reads() -> bool:
    """Whether the flags of this job keep attention within documents."""
    from megatron.training import get_args

    args = get_args()
    return any(getattr(args, name, False) for name in FLAGS)


@hook("megatron.training.utils:is_first_or_last_pipeline_stage", "vp_stage", STAGE_DATA.defect)
def read_on_every_stage(stock: Callable[[int | None], bool], vp_stage: int | None) -> bool:
    """Count every stage as one that reads batches where each of them needs its own.

    By this scripts decide on which ranks to build a dataset and for which stages to take a batch from it.
    """
    return every_stage_reads() or stock(vp_stage)


_WHOLE_BATCH = (
    "is_hybrid_cp create_attention_mask_in_dataloader broadcast_src_rank broadcast_group cp_size tp_rank "
    "micro_batch_size seq_length mtp_on_this_rank pipeline_model_parallel_size is_pipeline_first_stage "
    "is_pipeline_last_stage"
)


@hook(
    "megatron.core.utils:get_batch_on_this_tp_rank",
    (f"batch is_sft {_WHOLE_BATCH}", f"batch has_cu_seqlens {_WHOLE_BATCH}"),
    STAGE_DATA.defect,
    before={"megatron.training.utils:get_batch_on_this_tp_rank": "data_iterator mtp_on_this_rank"},
)
def send_whole_batch(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Send the whole batch to all tensor-parallel ranks where every stage needs it.

    Stock sends nothing, or only a part, to the other ranks of a stage between them, unless it predicts
    several tokens, for which all fields are sent.
    """
    call = bound(stock, *args, **kwargs)
    if every_stage_reads():
        call.arguments["mtp_on_this_rank"] = True
    return stock(*call.args, **call.kwargs)


SKIPPED_STEPS = Workaround(
    "--iterations-to-skip on every rank that reads samples, and on those that do not",
    EVERY,
    "tests/megatron/test_single_features.py::test_a_skipped_step_passes_its_samples_over",
)


@hook("megatron.training.training:dummy_train_step", "data_iterator", SKIPPED_STEPS.defect)
def pass_over(stock: Callable[[Any], None], data_iterator: Any) -> None:
    """Drop a step's samples from every iterator that this rank has.

    Stock takes them from one iterator on tensor-parallel rank 0 and broadcasts them.  But a rank with several
    chunks has an iterator for each, a stage between the first and the last has none, and under
    ``megatron_pp_ext.pretrain_gpt`` every tensor-parallel rank reads.
    """
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    while get_rerun_state_machine().should_run_forward_backward(data_iterator):
        for iterator in iterators:
            for _ in range(get_num_microbatches() if iterator is not None else 0):
                next(iterator)


BUCKET_PADDING = Workaround(
    "--dist-ckpt-optim-fully-reshardable where gradients are in several buckets",
    "0.17 to 0.19",
    "tests/megatron/test_crossing.py::test_goes_on_where_it_was",
)
"""Megatron pads the end of each bucket to a multiple of 128 and of the number of replicas.  To save a
distributed optimizer fully reshardable it gathers the state without this padding, and then takes each
parameter from where it begins with padding.  So the state of every parameter after a padded bucket is
another's, and the end of the last one is zeros.  The checkpoint loads without a word and trains on with other
weights.  Tied embeddings are a bucket of their own, so that it takes no flag to have several.

Megatron-LM has corrected this in its development version of 21 August 2026 (pull request 5077).
"""


@substitute(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_param_state_fully_reshardable",
    "self model_sharded_state_dict is_loading metadata",
    BUCKET_PADDING.defect,
)
def count_without_padding(stock: FunctionType) -> Callable[..., Any]:
    """Let a parameter's place be counted as its state is gathered, without the padding of earlier buckets."""
    if "buckets" in stock.__code__.co_names:
        return stock  # The corrected function looks at the padding of each bucket, the other at no bucket.

    @functools.wraps(stock)
    def sharded_param_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _places_without_padding(self.buffers):
            return stock(self, *args, **kwargs)

    return sharded_param_state


@contextmanager
def _places_without_padding(buffers: Iterable[Any]) -> Iterator[None]:
    """Let each buffer's map of parameters to [start, end), in elements, leave out the padding of buckets."""
    padded = [(buffer, buffer.param_index_map) for buffer in buffers]
    try:
        for buffer, places in padded:
            padding = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
            before = [0, *itertools.accumulate(padding)]
            buffer.param_index_map = {
                parameter: (start - before[bucket], end - before[bucket], bucket)
                for parameter, (start, end, bucket) in places.items()
            }
        yield
    finally:
        for buffer, places in padded:
            buffer.param_index_map = places


EARLY_EXPERTS = Workaround(
    "--overlap-param-gather-with-optimizer-step with experts that several data-parallel ranks have",
    EVERY,
    "tests/megatron/test_early_gather.py::test_experts_are_gathered_after_their_update",
)
"""With this flag Megatron gathers all weights of chunk 0 once the first optimizer of several is done.  But
where experts are parallel their optimizer is the last one.  So the other ranks' parts of chunk 0's experts
come from before the update, and are not gathered again: the next step trains with mixed weights.
"""


@hook(
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.start_param_sync",
    "self unused force_sync force_dispatch",
    EARLY_EXPERTS.defect,
)
def gather_when_updated(
    stock: Callable[..., None],
    ddp: Any,
    *unused: Any,
    force_sync: bool = False,
    force_dispatch: bool = False,
) -> None:
    """Gather experts when a step begins, and nothing but the other weights within an update.

    Stock does nothing when a step begins.  Where nobody starts a gather then, the first forward does.
    """
    if force_sync or not ddp.overlap_param_gather_with_optimizer_step:
        stock(ddp, force_sync=force_sync, force_dispatch=force_dispatch)
        return
    later = "expert_parallel_bucket_groups" if force_dispatch else "bucket_groups"
    groups = getattr(ddp, later)
    setattr(ddp, later, [])
    try:
        stock(ddp, force_dispatch=True)
    finally:
        setattr(ddp, later, groups)


DATASET_HELPERS = Workaround(
    "a wheel has the helpers built and no Makefile", EVERY, "tests/megatron/test_dataset_helpers.py"
)


@hook("megatron.core.datasets.utils:compile_helpers", "", DATASET_HELPERS.defect)
def skip_if_built(stock: Callable[[], None]) -> None:
    """Build the helpers only where this Python cannot import them.

    Stock's rank 0 runs ``make`` in megatron/core/datasets and ends the process with status 1 when that fails,
    as it always does in a wheel, which has no Makefile.
    """
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError:
        stock()


WORKAROUNDS = (STAGE_DATA, SKIPPED_STEPS, BUCKET_PADDING, EARLY_EXPERTS, DATASET_HELPERS)

HOOKS = hooks_of(sys.modules[__name__])
"""The hooks of a training script."""

IN_CORE = (*count_without_padding.hooks, *gather_when_updated.hooks)
"""The workarounds that any training loop needs."""
