"""The rules of features, which register in the order in which they are looked at."""

from megatron_pp_ext.features.guided import rules as guided
from megatron_pp_ext.features.offload import rules as offload
from megatron_pp_ext.features.pairs import rules as pairs
from megatron_pp_ext.features.units import rules as units
from megatron_pp_ext.features.vocabulary import rules as vocabulary
from megatron_pp_ext.job.rules.registry import Topic, register

register(Topic("guided", guided.RULES), after="measuring")
register(Topic("vocabulary", vocabulary.RULES, is_of_models=True), after="schedules")
register(Topic("pairs", pairs.RULES, is_of_models=True), after="vocabulary")
register(Topic("offload", offload.RULES), after="without_flush")
register(Topic("lengths", units.ORDER_RULES, is_of_models=True), after="offload")
register(Topic("slices", units.SLICE_RULES, is_of_models=True, is_of_calls=True), after="lengths")
