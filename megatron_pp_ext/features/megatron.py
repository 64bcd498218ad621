"""Where features enter Megatron: their hooks, and what they bring to steps, in the order of its set-up."""

from megatron_pp_ext.features.guided.megatron.profile_guided import guide
from megatron_pp_ext.features.offload.megatron.host_activations import offloading
from megatron_pp_ext.features.offload.megatron.host_limit import require_free
from megatron_pp_ext.features.pairs.megatron import (
    config_checks,
    planned_stage,
    recomputed_segments,
    token_exchanges,
)
from megatron_pp_ext.features.units.megatron.shapes import announcing
from megatron_pp_ext.features.units.megatron.steps import in_units
from megatron_pp_ext.features.vocabulary.megatron.dealing import deal_out, frozen_output
from megatron_pp_ext.features.vocabulary.megatron.model_vocabulary import shared
from megatron_pp_ext.integration import start_up
from megatron_pp_ext.integration.core import built_chunks, chunk_pipelines
from megatron_pp_ext.integration.runners import model_options, sources
from megatron_pp_ext.integration.runners.step_parts import register

for make in (announcing, in_units, shared, planned_stage.planned, offloading):
    register(make)
built_chunks.register(deal_out)
model_options.register(frozen_output)

sources.register(guide)
chunk_pipelines.register(config_checks.check_as_planned)
start_up.register(require_free)

HOOKED = (planned_stage, recomputed_segments, token_exchanges)
"""The modules with hooks (``integration.patching.hook``)."""
