"""Features that change schedules, a folder each.  They register here, in the order in which passes run."""

from megatron_pp_ext.compiler.make import register
from megatron_pp_ext.features.offload.order import offloaded
from megatron_pp_ext.features.vocabulary import options as vocabulary
from megatron_pp_ext.features.vocabulary.order import shared, without_frozen_weight
from megatron_pp_ext.job import options, other_sums

for one in (shared, offloaded, without_frozen_weight):
    register(one)

options.register(
    vocabulary.read,
    permitted=vocabulary.permitted_flags,
    flags=vocabulary.flags,
    arguments={"vocabulary": vocabulary.requested},
)
other_sums.register(vocabulary.SUMS)
