"""The hooks that only a machine without a GPU needs, where stubs for torch.cuda are not enough."""

from megatron_pp_ext.cpu import attention, checkpoint_writers, norms, optimizer
from megatron_pp_ext.integration.patching import Seam
from megatron_pp_ext.integration.releases import CORE_0_17

CPU = (
    Seam(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        {CORE_0_17: "cls config hidden_size eps persist_layer_norm zero_centered_gamma normalization"},
        norms.mark_for_sequence_parallelism,
        "--sequence-parallel with torch's norms",
    ),
    Seam(
        "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
        {
            CORE_0_17: "self config layer_number attn_mask_type attention_type attention_dropout "
            "softmax_scale cp_comm_type pg_collection"
        },
        attention.accept_context_parallelism,
        "--context-parallel-size with Megatron's own attention",
    ),
    Seam(
        "megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
        {CORE_0_17: "self query key value attention_mask attn_mask_type attention_bias packed_seq_params"},
        attention.attend_to_all_ranks,
        "--context-parallel-size with Megatron's own attention",
    ),
    Seam(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.state_dict",
        {CORE_0_17: "self"},
        optimizer.give_state,
        "resuming torch's Adam under the distributed optimizer",
    ),
    Seam(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict",
        {CORE_0_17: "self state_dict"},
        optimizer.give_own_counters,
        "resuming torch's Adam under the distributed optimizer",
    ),
    Seam(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_parameter_state_from_dp_zero",
        {CORE_0_17: "self state_dict update_legacy_format"},
        optimizer.load_without_gradients,
        "resuming torch's Adam under the distributed optimizer",
    ),
    Seam(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
        {CORE_0_17: "self model_param tensors"},
        optimizer.keep_own_step,
        "resuming torch's Adam under the distributed optimizer",
    ),
    Seam(
        "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.preload_tensors",
        {CORE_0_17: "write_buckets non_blocking"},
        checkpoint_writers.copy_shared,
        "--async-save of tensors that are on the CPU already",
    ),
)
"""What Megatron needs to run without a GPU, in addition to the stubs."""
