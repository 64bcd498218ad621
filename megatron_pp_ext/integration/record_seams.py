"""The places where what a run does is written down, without a change to it.

They are seams like those in ``seams``, which lists them with its own.
"""

from megatron_pp_ext.integration.core import action_recording
from megatron_pp_ext.integration.patching import Seam
from megatron_pp_ext.integration.releases import CORE_0_17, CORE_0_19
from megatron_pp_ext.integration.trainer import step_recording

_TRAIN_STEP = (
    "forward_step_func data_iterator model optimizer opt_param_scheduler config forward_backward_func "
    "iteration"
)

RECORDS = (
    Seam(
        "megatron.core.pipeline_parallel.schedules:forward_step",
        {
            CORE_0_17: "forward_step_func data_iterator model num_microbatches input_tensor "
            "forward_data_store config cp_group_size collect_non_loss_data "
            "checkpoint_activations_microbatch is_first_microbatch current_microbatch vp_stage is_last_stage"
        },
        action_recording.record_forward,
        "--pipeline-trace of stock's schedules",
    ),
    Seam(
        "megatron.core.pipeline_parallel.schedules:backward_step",
        {CORE_0_17: "input_tensor output_tensor output_tensor_grad config"},
        action_recording.record_backward,
        "--pipeline-trace of stock's schedules",
    ),
    Seam(
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync",
        {CORE_0_17: "self force_all_reduce"},
        action_recording.record_reduction_start,
        "--pipeline-trace of gradient reduction",
    ),
    Seam(
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.finish_grad_sync",
        {CORE_0_17: "self force_all_reduce"},
        action_recording.record_reduction_end,
        "--pipeline-trace of gradient reduction",
    ),
    Seam(
        "megatron.core.pipeline_parallel.utils:ScheduleNode.stream_acquire_context",
        {CORE_0_17: "self name"},
        action_recording.record_exchange,
        "--pipeline-trace of exchanges of tokens",
    ),
    Seam(
        "megatron.training.training:train_step",
        {
            CORE_0_17: _TRAIN_STEP,
            CORE_0_19: f"{_TRAIN_STEP} pg_collection p2p_communicator",
        },
        step_recording.record_step,
        "losses and gradients that mpp verify compares",
    ),
)
"""What is recorded: for a trace where our executor does not run, and for a comparison with stock."""
