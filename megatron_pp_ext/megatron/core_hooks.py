"""The hooks into megatron.core: placement, the step, updates, checkpoints and recording.

Each hook states the place, its parameters since which release, and the hook's purpose.
"""

from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.megatron import frameworks, patching, workarounds
from megatron_pp_ext.megatron.core import (
    chunk_pipelines,
    data_parallel,
    embedding_copies,
    local_linear,
    optimizer,
    placed_models,
    replicated_ranks,
)
from megatron_pp_ext.megatron.patching import hooks_of
from megatron_pp_ext.megatron.runners import choose, cuda_graphs, fine_grained_offload, tracing

CORE = (
    # The stages that a placement puts on this rank: groups, replicas, chunks of models, copies of weights.
    *hooks_of(replicated_ranks, embedding_copies, placed_models),
    # The step: which actions run in which order, with the backward in two halves, what features add, and the
    # updates of each stage by itself.
    *hooks_of(
        choose,
        optimizer,
        local_linear,
        data_parallel,
        chunk_pipelines,
        fine_grained_offload,
        cuda_graphs,
        *(module for feature in FEATURES for module in feature.hooked()),
    ),
    # What is recorded for a trace, without a change to what a run does.
    *hooks_of(tracing),
)

INSTALLED = (*CORE, *workarounds.IN_CORE)
"""The hooks of ``megatron_pp_ext.install``."""

patching.apply_when_imported(frameworks.HOOKS, (*frameworks.ENGINE, *frameworks.LOGS))
