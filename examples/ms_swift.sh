#!/usr/bin/env bash
# Fine-tunes by ms-swift's own script on Megatron, with two pipeline ranks, under a schedule that is compiled for
# the memory of 1F1B. "mpp activate" has to have run in ms-swift's environment.
#
#   SWIFT=CHECKOUT examples/ms_swift.sh
#
#   SCRIPT         ms-swift's script (examples/megatron/mcore_bridge/full/moe.sh, on 8 GPUs)
#   SCHEDULE       the schedule (flex)
#   CHUNKS         its chunks a rank: 2 need --virtual_pipeline_model_parallel_size 2 in the script, and even stages (1)
#   MEMORY_LIMIT   with flex, the activations that it may keep, as a part of what 1F1B keeps (1.0)
#   RANKS          its pipeline ranks, those of the script (2)
#   MICROBATCHES   those of a step: the global batch over the replicas (4)
#   DRY_RUN        1 prints the command instead of running it

set -euo pipefail

: "${SWIFT:?has to name a checkout of ms-swift: set it}" "${SCHEDULE:=flex}" "${CHUNKS:=1}" "${RANKS:=2}" "${MICROBATCHES:=4}"
: "${SCRIPT:=examples/megatron/mcore_bridge/full/moe.sh}"
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

settings=(MEGATRON_PP_SCHEDULE="$SCHEDULE" MEGATRON_PP_RANKS="$RANKS" MEGATRON_PP_MICROBATCHES="$MICROBATCHES")
if [[ "$SCHEDULE" == flex ]]; then
    settings+=(MEGATRON_PP_MEMORY_LIMIT="${MEMORY_LIMIT:-1.0}" MEGATRON_PP_CHUNKS="$CHUNKS")
fi
command=(env "${settings[@]}" bash "$SWIFT/$SCRIPT")
if is_true DRY_RUN; then print_command "${command[@]}"; else exec "${command[@]}"; fi
