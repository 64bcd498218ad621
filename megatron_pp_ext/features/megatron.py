"""Where features enter Megatron: their hooks, and what they bring to steps, in the order of its set-up."""

from megatron_pp_ext.features.lengths.megatron.ordered_data import ordered
from megatron_pp_ext.features.offload.megatron.host_activations import offloading
from megatron_pp_ext.features.pairs.megatron import planned_stage
from megatron_pp_ext.features.vocabulary.megatron.model_vocabulary import shared
from megatron_pp_ext.integration.runners.step_parts import register

for make in (ordered, shared, planned_stage.planned, offloading):
    register(make)

HOOKED = (planned_stage,)
"""The modules with hooks (``integration.patching.hook``)."""
