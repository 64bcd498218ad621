"""The rules of features, which register in the order in which they are looked at."""

from megatron_pp_ext.features.guided import rules as guided
from megatron_pp_ext.features.lengths import rules as lengths
from megatron_pp_ext.features.offload import rules as offload
from megatron_pp_ext.features.pairs import rules as pairs
from megatron_pp_ext.features.slices import rules as slices
from megatron_pp_ext.features.vocabulary import rules as vocabulary
from megatron_pp_ext.job.rules.registry import Topic, register

register(Topic("guided", guided.RULES), after="measuring")
register(Topic("vocabulary", vocabulary.RULES, is_of_models=True), after="schedules")
register(Topic("pairs", pairs.RULES, is_of_models=True), after="vocabulary")
register(Topic("offload", offload.RULES), after="without_flush")
register(Topic("lengths", lengths.RULES, is_of_models=True), after="offload")
register(Topic("slices", slices.RULES, is_of_models=True, is_of_calls=True), after="lengths")
