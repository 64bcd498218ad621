"""The mends of megatron.core, which any trainer on it needs; they want nothing of megatron.training."""

from megatron_pp_ext.integration.mends import bucket_padding, gathering_ahead

MENDS = (gathering_ahead.MEND, bucket_padding.MEND)

SEAMS = tuple(seam for mend in MENDS for seam in mend.seams)
