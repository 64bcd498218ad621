#!/usr/bin/env bash
# Trains by one of NeMo-RL's own recipes on Megatron, under ZB-H1. Where a recipe computes activations again, ZB-H1
# keeps far more than 1F1B (docs/trainers.md): take SCHEDULE=flex there. NeMo-RL trains one chunk a rank, so that schedules
# with several are not for it. It passes the environment on to its workers, which have an environment of packages of
# their own: megatron_pp_ext has to be installed in that, once (uv pip install --python WORKER/bin/python
# megatron_pp_ext), and this script activates it there.
#
#   NEMO_RL=CHECKOUT examples/nemo_rl.sh [MORE OVERRIDES...]
#
#   CONFIG         NeMo-RL's recipe (examples/configs/grpo_math_70B_megatron.yaml, on 64 GPUs)
#   SCHEDULE       the schedule, of one chunk a rank (zb-h1)
#   MEMORY_LIMIT   with flex, the activations that it may keep, as a part of what 1F1B keeps (1.0)
#   RANKS          its pipeline ranks, those of the recipe (4)
#   MICROBATCHES   about as many as a step has; each step may have others (44)
#   WORKER         the workers' environment (that of NEMO_RL_VENV_DIR, or in the checkout's folder venvs)
#   DRY_RUN        1 prints the commands instead of running them

set -euo pipefail

: "${NEMO_RL:?has to name a checkout of NeMo-RL: set it}" "${SCHEDULE:=zb-h1}" "${RANKS:=4}" "${MICROBATCHES:=44}"
: "${CONFIG:=examples/configs/grpo_math_70B_megatron.yaml}"
worker=nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker
: "${WORKER:=${NEMO_RL_VENV_DIR:-$NEMO_RL/venvs}/$worker}"
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

activate=("$WORKER/bin/mpp" activate)
settings=(MEGATRON_PP_SCHEDULE="$SCHEDULE" MEGATRON_PP_RANKS="$RANKS" MEGATRON_PP_MICROBATCHES="$MICROBATCHES")
if [[ "$SCHEDULE" == flex ]]; then
    settings+=(MEGATRON_PP_MEMORY_LIMIT="${MEMORY_LIMIT:-1.0}" MEGATRON_PP_CHUNKS=1)
fi
command=(
    env "${settings[@]}" uv run --directory "$NEMO_RL" examples/run_grpo.py --config "$CONFIG" "$@"
)
if is_true DRY_RUN; then
    print_command "${activate[@]}"
    print_command "${command[@]}"
else
    "${activate[@]}"
    exec "${command[@]}"
fi
