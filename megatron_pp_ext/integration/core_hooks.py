"""The hooks into megatron.core: placement, the step, updates, checkpoints and recording.

Each hook states the place, its parameters since which release, and the hook's purpose.
"""

from megatron_pp_ext.features.megatron import HOOKED
from megatron_pp_ext.integration import frameworks
from megatron_pp_ext.integration.core import (
    action_recording,
    checkpoint_copies,
    chunk_pipelines,
    data_parallel,
    embedding_copies,
    expert_exchange,
    late_checks,
    local_linear,
    offload_order,
    placed_functions,
    placed_models,
    placed_optimizer_state,
    replicated_ranks,
    stage_optimizer,
)
from megatron_pp_ext.integration.patching import hooks_of
from megatron_pp_ext.integration.runners import choose, cuda_graphs
from megatron_pp_ext.integration.workarounds import of_core

CORE = (
    # The stages that a placement puts on this rank: groups, tied gradients, replicas, chunks of models.
    *hooks_of(replicated_ranks, embedding_copies, placed_models, placed_functions),
    # The step: which actions run in which order, with the backward in two halves, and what features add.
    *hooks_of(
        choose,
        late_checks,
        local_linear,
        expert_exchange,
        data_parallel,
        chunk_pipelines,
        offload_order,
        cuda_graphs,
        *HOOKED,
    ),
    # Updates of each stage by itself, and checkpoints of a rank that has both ends of a model.
    *hooks_of(stage_optimizer, checkpoint_copies, placed_optimizer_state),
    # What is recorded for a trace, without a change to what a run does.
    *hooks_of(action_recording),
)

INSTALLED = (*CORE, *of_core.HOOKS)
"""The hooks of ``megatron_pp_ext.install``."""

# Whatever builds a model is imported by then.
chunk_pipelines.after_config(frameworks.put_in_place)
placed_models.after_last_chunk(frameworks.put_in_place)
