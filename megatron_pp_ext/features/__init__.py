"""Features that change schedules, a folder each.  They register here, in the order in which passes run."""

from megatron_pp_ext.compiler.make import register
from megatron_pp_ext.features.offload.order import offloaded
from megatron_pp_ext.features.vocabulary import options as vocabulary_options
from megatron_pp_ext.features.vocabulary.order import shared, without_frozen_weight

for one in (shared, offloaded, without_frozen_weight):
    register(one)

vocabulary_options.register()
