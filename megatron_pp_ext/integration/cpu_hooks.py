"""The hooks that only a machine without a GPU needs, where stubs for torch.cuda are not enough."""

from megatron_pp_ext.cpu import attention, checkpoint_writers, norms, optimizer
from megatron_pp_ext.integration.patching import Hook
from megatron_pp_ext.integration.places import Place

_ROWS = (
    (
        "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        "cls config hidden_size eps persist_layer_norm zero_centered_gamma normalization",
        norms.mark_for_sequence_parallelism,
        "--sequence-parallel with torch's norms",
    ),
    (
        "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
        "self config layer_number attn_mask_type attention_type attention_dropout softmax_scale cp_comm_type "
        "pg_collection",
        attention.accept_context_parallelism,
        "--context-parallel-size with Megatron's own attention",
    ),
    (
        "megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
        "self query key value attention_mask attn_mask_type attention_bias packed_seq_params",
        attention.attend_to_all_ranks,
        "--context-parallel-size with Megatron's own attention",
    ),
    (
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.state_dict",
        "self",
        optimizer.give_state,
        "resuming torch's Adam under the distributed optimizer",
    ),
    (
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict",
        "self state_dict",
        optimizer.give_own_counters,
        "resuming torch's Adam under the distributed optimizer",
    ),
    (
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_parameter_state_from_dp_zero",
        "self state_dict update_legacy_format",
        optimizer.load_without_gradients,
        "resuming torch's Adam under the distributed optimizer",
    ),
    (
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
        "self model_param tensors",
        optimizer.keep_own_step,
        "resuming torch's Adam under the distributed optimizer",
    ),
    (
        "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.preload_tensors",
        "write_buckets non_blocking",
        checkpoint_writers.copy_shared,
        "--async-save of tensors that are on the CPU already",
    ),
)

CPU = tuple(Hook((Place(path, (known,)),), wrap, why) for path, known, wrap, why in _ROWS)
"""Replacements without which Megatron does not run without a GPU, besides the stubs."""
