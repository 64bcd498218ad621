"""Features that change schedules, a folder each.  They register here, in the order in which passes run."""

from megatron_pp_ext.compiler import compile, make
from megatron_pp_ext.features.guided import options as guided_options
from megatron_pp_ext.features.offload import options as offload_options
from megatron_pp_ext.features.offload.order import offloaded
from megatron_pp_ext.features.pairs import options as pairs_options
from megatron_pp_ext.features.pairs.order import compiled, counted, paired
from megatron_pp_ext.features.units import options as units_options
from megatron_pp_ext.features.units.sliced_orders import sliced
from megatron_pp_ext.features.vocabulary import options as vocabulary_options
from megatron_pp_ext.features.vocabulary.order import shared, without_frozen_weight
from megatron_pp_ext.job import options, our_flags

for one in (paired, shared, offloaded, without_frozen_weight, sliced):
    make.register(one)
make.register_costs(counted)
compile.register(compiled)
vocabulary_options.register()
units_options.register()
offload_options.register()
for read in (pairs_options.read, guided_options.read):
    options.register(read)
our_flags.register(guided_options.__file__)
