#!/usr/bin/env bash
# Trains by verl's own GRPO script on Megatron, on one node of 8 GPUs with two pipeline ranks: ZB-H1, and the
# microbatches of updates in an order planned by the lengths of their samples. "mpp activate" has to have run in verl's
# environment. Ray's workers on this node inherit the variables.
#
#   VERL=CHECKOUT examples/verl.sh [MORE OVERRIDES...]
#
#   SCRIPT         verl's script (examples/grpo_trainer/run_qwen3_8b_megatron.sh)
#   SCHEDULE       the schedule; one with two chunks a rank, such as v-half, gets verl's overrides for them (zb-h1)
#   RANKS          its pipeline ranks, those of the script (2)
#   MICROBATCHES   about as many as an update has; each update may have others (24)
#   DRY_RUN        1 prints the command instead of running it

set -euo pipefail

: "${VERL:?has to name a checkout of verl: set it}" "${SCHEDULE:=zb-h1}" "${RANKS:=2}" "${MICROBATCHES:=24}"
: "${SCRIPT:=examples/grpo_trainer/run_qwen3_8b_megatron.sh}"
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

overrides=()
if [[ "$SCHEDULE" == v-* ]]; then
    actor=actor_rollout_ref.actor.megatron
    overrides=(
        "$actor.virtual_pipeline_model_parallel_size=2"
        actor_rollout_ref.ref.megatron.virtual_pipeline_model_parallel_size=2
        # Otherwise verl makes as many microbatches as stock's interleaved schedule takes.
        "+$actor.override_transformer_config.microbatch_group_size_per_vp_stage=1"
    )
fi
command=(
    env MEGATRON_PP_SCHEDULE="$SCHEDULE" MEGATRON_PP_RANKS="$RANKS" MEGATRON_PP_MICROBATCHES="$MICROBATCHES"
    MEGATRON_PP_ORDER=rule bash "$VERL/$SCRIPT" "${overrides[@]}" "$@"
)
if is_true DRY_RUN; then print_command "${command[@]}"; else exec "${command[@]}"; fi
