"""The seams in Megatron's training loop where it fails under any schedule, on a GPU as on a CPU."""

from megatron_pp_ext.integration.mends import gathering_ahead, growing_batches
from megatron_pp_ext.integration.patching import Seam
from megatron_pp_ext.integration.releases import CORE_0_17, CORE_0_18

_REPLICATED = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"

LOOP = (
    Seam(
        f"{_REPLICATED}.enable_forward_pre_hook",
        {CORE_0_17: "self"},
        gathering_ahead.put_once,
        "--overlap-param-gather with an evaluation or a checkpoint while fp16 skips steps",
    ),
    Seam(
        f"{_REPLICATED}.disable_forward_pre_hook",
        {CORE_0_17: "self param_sync"},
        gathering_ahead.take_what_is_there,
        "--overlap-param-gather with an evaluation or a checkpoint while fp16 skips steps",
    ),
    Seam(
        "megatron.training.training:get_train_valid_test_num_samples",
        {CORE_0_18: ""},
        growing_batches.count_all_samples,
        "--step-batch-size-schedule with --train-iters",
    ),
)
