"""Where schedules enter megatron.training: its flags, model and data, its loop, checkpoints and reports."""

from megatron_pp_ext.integration.patching import hooks_of
from megatron_pp_ext.integration.trainer import (
    checkpoint_loading,
    layer_seeds,
    memory_report,
    parser,
    placed_data,
    replica_samples,
    same_request,
    stage_statistics,
    step_recording,
    validation,
)

TRAINER = (
    # The flags that request a schedule.
    *hooks_of(parser, validation, same_request),
    # The model's chunks, their initial weights and their data.
    *hooks_of(layer_seeds, placed_data, replica_samples),
    # Updates, logs, checkpoints and records of the training loop, and Megatron's report of memory.
    *hooks_of(stage_statistics, checkpoint_loading, step_recording, memory_report),
)
