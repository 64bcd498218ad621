#!/usr/bin/env bash
# Trains by one of slime's own scripts, with two lines more in it: slime_hook.py, which installs a schedule and orders
# the microbatches of a step, and the variables and the path that slime's training processes get for it.
# megatron_pp_ext has to be installed in slime's environment.
#
#   SLIME=CHECKOUT examples/slime.sh
#
#   SCRIPT         slime's script (scripts/run-qwen3-235B-A22B.sh, on 64 GPUs); it needs a line "MISC_ARGS=("
#   SCHEDULE       the schedule. Two chunks a rank need --num-virtual-stages-per-pipeline-rank 2 and
#                  --microbatch-group-size-per-virtual-pipeline-stage 1 in the script, and even stages (flex)
#   MEMORY_LIMIT   with flex, the activations that it may keep, as a part of what 1F1B keeps (1.0)
#   MICROBATCHES   about as many as a step has; each step may have others (3)
#   MEGATRON       the Megatron-LM that slime's processes import (/root/Megatron-LM)
#   DRY_RUN        1 prints the script instead of running it

set -euo pipefail

: "${SLIME:?has to name a checkout of slime: set it}" "${SCHEDULE:=flex}" "${MICROBATCHES:=3}"
: "${SCRIPT:=scripts/run-qwen3-235B-A22B.sh}" "${MEGATRON:=/root/Megatron-LM}"
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

folder="$(cd "$examples" && pwd)"
variables="{\"PIPELINE_SCHEDULE\": \"$SCHEDULE\", \"PIPELINE_MICROBATCHES\": \"$MICROBATCHES\""
if [[ "$SCHEDULE" == flex ]]; then variables+=", \"PIPELINE_MEMORY_LIMIT\": \"${MEMORY_LIMIT:-1.0}\""; fi
variables+=", \"PYTHONPATH\": \"$folder:$MEGATRON\"}"
ours="${SCRIPT%.sh}-megatron_pp_ext.sh" # next to slime's own, where it finds its other files
text="$(sed "s|^MISC_ARGS=(|&\n   --custom-megatron-init-path slime_hook.install\n   --train-env-vars '$variables'|" \
    "$SLIME/$SCRIPT")"
if [[ "$text" != *slime_hook.install* ]]; then
    echo "$SLIME/$SCRIPT has no line that begins with MISC_ARGS=(: add both flags to its arguments of train.py" >&2
    exit 2
fi
if is_true DRY_RUN; then
    printf '%s\n' "$text"
else
    printf '%s\n' "$text" >"$SLIME/$ours"
    cd "$SLIME"
    exec bash "$ours"
fi
