"""Every mend; ``mpp doctor`` lists them with their releases and tests."""

from megatron_pp_ext.integration.mends import (
    bucket_padding,
    damaged_checkpoint,
    dataset_helpers,
    gathering_ahead,
    growing_batches,
    needed_flags,
    skipped_steps,
    stage_data,
)

MENDS = (
    stage_data.MEND,
    skipped_steps.MEND,
    growing_batches.MEND,
    gathering_ahead.MEND,
    bucket_padding.MEND,
    damaged_checkpoint.MEND,
    dataset_helpers.MEND,
    needed_flags.MEND,
)

SEAMS = tuple(seam for mend in MENDS for seam in mend.seams)
