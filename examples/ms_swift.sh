#!/usr/bin/env bash
# Fine-tunes by ms-swift's own script on Megatron, with two pipeline ranks, under ZB-H1. "mpp activate" has to have run
# in ms-swift's environment.
#
#   SWIFT=CHECKOUT examples/ms_swift.sh
#
#   SCRIPT         ms-swift's script (examples/megatron/mcore_bridge/full/moe.sh, on 8 GPUs)
#   SCHEDULE       the schedule. One with two chunks a rank, such as v-half, needs --virtual_pipeline_model_parallel_size
#                  2 in the script, and even stages in the place of --decoder_first_pipeline_num_layers (zb-h1)
#   RANKS          its pipeline ranks, those of the script (2)
#   MICROBATCHES   those of a step: the global batch over the replicas (4)
#   DRY_RUN        1 prints the command instead of running it

set -euo pipefail

: "${SWIFT:?has to name a checkout of ms-swift: set it}" "${SCHEDULE:=zb-h1}" "${RANKS:=2}" "${MICROBATCHES:=4}"
: "${SCRIPT:=examples/megatron/mcore_bridge/full/moe.sh}"
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

command=(
    env MEGATRON_PP_SCHEDULE="$SCHEDULE" MEGATRON_PP_RANKS="$RANKS" MEGATRON_PP_MICROBATCHES="$MICROBATCHES"
    bash "$SWIFT/$SCRIPT"
)
if is_true DRY_RUN; then print_command "${command[@]}"; else exec "${command[@]}"; fi
