"""What features add to the plan of a rank.  They register here, in the order of their operations."""

from megatron_pp_ext.features.offload.runtime.operations import copies_of
from megatron_pp_ext.features.pairs.runtime.operations import pairs_of
from megatron_pp_ext.features.vocabulary.runtime.operations import part_of
from megatron_pp_ext.runtime.extension import register

for extend in (copies_of, part_of, pairs_of):
    register(extend)
