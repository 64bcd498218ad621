"""Where schedules enter megatron.core: placement, the step, updates, checkpoints and what is recorded.

Each hook states the place, the parameters that it has since which release, and what the hook is for.
"""

from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.integration import frameworks, patching
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
from megatron_pp_ext.integration.patching import seams_of
from megatron_pp_ext.integration.runners import choose, cuda_graphs
from megatron_pp_ext.integration.workarounds import of_core

CORE = (
    # The stages that a placement puts on this rank: groups, tied gradients, replicas, chunks of models.
    *seams_of(replicated_ranks, embedding_copies, placed_models, placed_functions),
    # The step: which actions run in which order, with the backward in two halves, and what features add.
    *seams_of(
        choose,
        late_checks,
        local_linear,
        expert_exchange,
        data_parallel,
        chunk_pipelines,
        offload_order,
        cuda_graphs,
        *(module for feature in FEATURES for module in feature.hooked()),
    ),
    # Updates of each stage by itself, and checkpoints of a rank that has both ends of a model.
    *seams_of(stage_optimizer, checkpoint_copies, placed_optimizer_state),
    # What is recorded for a trace, without a change to what a run does.
    *seams_of(action_recording),
)

INSTALLED = (*CORE, *of_core.SEAMS)
"""What ``megatron_pp_ext.install`` replaces."""

patching.apply_when_imported(frameworks.SEAMS, frameworks.ENGINE)
