#!/usr/bin/env bash
# Trains by verl's own GRPO script on Megatron, on one node of 8 GPUs with two pipeline ranks: a V of two chunks a
# rank that is compiled for the memory of 1F1B, and the microbatches of updates in an order planned by the lengths of
# their samples. "mpp activate" has to have run in verl's environment. Ray's workers on this node inherit the variables.
#
#   VERL=CHECKOUT examples/verl.sh [MORE OVERRIDES...]
#
#   SCRIPT         verl's script (examples/grpo_trainer/run_qwen3_8b_megatron.sh)
#   SCHEDULE       the schedule (flex)
#   CHUNKS         its chunks a rank; two get verl's overrides for them, 1 leaves the script as it is (2)
#   MEMORY_LIMIT   with flex, the activations that it may keep, as a part of what 1F1B keeps (1.0)
#   RANKS          its pipeline ranks, those of the script (2)
#   MICROBATCHES   about as many as an update has; each update may have others (24)
#   DRY_RUN        1 prints the command instead of running it

set -euo pipefail

: "${VERL:?has to name a checkout of verl: set it}" "${SCHEDULE:=flex}" "${CHUNKS:=2}" "${RANKS:=2}" "${MICROBATCHES:=24}"
: "${SCRIPT:=examples/grpo_trainer/run_qwen3_8b_megatron.sh}"
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

overrides=()
if [[ "$CHUNKS" == 2 ]]; then
    actor=actor_rollout_ref.actor.megatron
    overrides=(
        "$actor.virtual_pipeline_model_parallel_size=2"
        actor_rollout_ref.ref.megatron.virtual_pipeline_model_parallel_size=2
        # Otherwise verl makes as many microbatches as stock's interleaved schedule takes.
        "+$actor.override_transformer_config.microbatch_group_size_per_vp_stage=1"
    )
fi
settings=(MEGATRON_PP_SCHEDULE="$SCHEDULE" MEGATRON_PP_RANKS="$RANKS" MEGATRON_PP_MICROBATCHES="$MICROBATCHES")
if [[ "$SCHEDULE" == flex ]]; then
    settings+=(MEGATRON_PP_MEMORY_LIMIT="${MEMORY_LIMIT:-1.0}" MEGATRON_PP_CHUNKS="$CHUNKS")
fi
command=(env "${settings[@]}" MEGATRON_PP_ORDER=rule bash "$VERL/$SCRIPT" "${overrides[@]}" "$@")
if is_true DRY_RUN; then print_command "${command[@]}"; else exec "${command[@]}"; fi
