"""Every place where this package enters Megatron-LM.

``core_hooks`` has the hooks of schedules into megatron.core, ``TRAINER`` those into megatron.training, and
``CPU`` those for a machine without a GPU.  ``patching`` checks and replaces them, ``mpp doctor`` lists them.
"""

from megatron_pp_ext.cpu import checkpoint_writers, megatron_stubs
from megatron_pp_ext.megatron import workarounds
from megatron_pp_ext.megatron.core_hooks import CORE
from megatron_pp_ext.megatron.patching import Hook, Place, hooks_of
from megatron_pp_ext.megatron.trainer import (
    agreement,
    checkpoint_loading,
    layer_seeds,
    placed_data,
    reports,
    step_fields,
    validation,
)

TRAINER = (
    # The flags that request a schedule.
    *hooks_of(validation, agreement),
    # The model's chunks, their initial weights and their data.
    *hooks_of(layer_seeds, placed_data),
    # Updates, logs, checkpoints and records of the training loop, and Megatron's report of memory.
    *hooks_of(reports, step_fields, checkpoint_loading),
)


_ROWS = (
    (
        "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        "cls config hidden_size eps persist_layer_norm zero_centered_gamma normalization",
        megatron_stubs.mark_for_sequence_parallelism,
        "--sequence-parallel with torch's norms",
    ),
    (
        "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
        "self config layer_number attn_mask_type attention_type attention_dropout softmax_scale cp_comm_type "
        "pg_collection",
        megatron_stubs.accept_context_parallelism,
        "--context-parallel-size with Megatron's own attention",
    ),
    (
        "megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
        "self query key value attention_mask attn_mask_type attention_bias packed_seq_params",
        megatron_stubs.attend_to_all_ranks,
        "--context-parallel-size with Megatron's own attention",
    ),
    (
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.state_dict",
        "self",
        megatron_stubs.give_state,
        "resuming torch's Adam under the distributed optimizer",
    ),
    (
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict",
        "self state_dict",
        megatron_stubs.give_own_counters,
        "resuming torch's Adam under the distributed optimizer",
    ),
    (
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_parameter_state_from_dp_zero",
        "self state_dict update_legacy_format",
        megatron_stubs.load_without_gradients,
        "resuming torch's Adam under the distributed optimizer",
    ),
    (
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
        "self model_param tensors",
        megatron_stubs.keep_own_step,
        "resuming torch's Adam under the distributed optimizer",
    ),
    (
        "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.preload_tensors",
        "write_buckets non_blocking",
        checkpoint_writers.copy_shared,
        "--async-save of tensors that are on the CPU already",
    ),
)

CPU = tuple(Hook((Place(path, (names,)),), wrap, why) for path, names, wrap, why in _ROWS)
"""Replacements without which Megatron does not run without a GPU, besides the stubs."""


def all_hooks(cpu: bool = False) -> tuple[Hook, ...]:
    """Return the hooks of the launcher, with ``cpu`` on a machine without a GPU."""
    return (*launch_hooks(cpu), *schedule_hooks())


def launch_hooks(cpu: bool) -> tuple[Hook, ...]:
    """Return the hooks without which a training script would not run on some machines, under any schedule."""
    return (*workarounds.HOOKS, *CPU) if cpu else workarounds.HOOKS


def schedule_hooks() -> tuple[Hook, ...]:
    """Return the hooks that bring schedules into a training run."""
    return (*CORE, *TRAINER)
