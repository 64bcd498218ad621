"""Every mend; ``mpp doctor`` lists them with their releases and tests."""

from megatron_pp_ext.integration.mends import (
    damaged_checkpoint,
    dataset_helpers,
    growing_batches,
    needed_flags,
    of_core,
    skipped_steps,
    stage_data,
)

MENDS = (
    stage_data.MEND,
    skipped_steps.MEND,
    growing_batches.MEND,
    *of_core.MENDS,
    damaged_checkpoint.MEND,
    dataset_helpers.MEND,
    needed_flags.MEND,
)

SEAMS = tuple(seam for mend in MENDS for seam in mend.seams)
