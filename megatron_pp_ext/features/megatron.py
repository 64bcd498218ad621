"""Where features enter Megatron: their hooks, and what they bring to steps, in the order of its set-up."""

from megatron_pp_ext.features.offload.megatron.host_activations import offloading
from megatron_pp_ext.features.pairs.megatron import planned_stage
from megatron_pp_ext.features.vocabulary.megatron.dealing import deal_out, frozen_output
from megatron_pp_ext.features.vocabulary.megatron.model_vocabulary import shared
from megatron_pp_ext.integration.core import built_chunks
from megatron_pp_ext.integration.runners import model_options
from megatron_pp_ext.integration.runners.step_parts import register

for make in (shared, planned_stage.planned, offloading):
    register(make)
built_chunks.register(deal_out)
model_options.register(frozen_output)

HOOKED = (planned_stage,)
"""The modules with hooks (``integration.patching.hook``)."""
