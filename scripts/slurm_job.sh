# shellcheck shell=bash
# The common part of both batch scripts, which source it. Settings, in the environment of sbatch:
#
#   SCRIPT         the training script, such as Megatron-LM/pretrain_gpt.py (required)
#   PYTHON         the interpreter in which megatron_pp_ext is installed (python3)
#   GPUS_PER_NODE  ranks a node (what SLURM gave the job, else 8)
#   MASTER_PORT    (by job number)
#   CONTAINER      an image for pyxis; MOUNTS what it sees, as in --container-mounts
#   DRY_RUN        1 prints the command instead of running it
#
# Arguments are the training script's. With --save and --load on one folder a job that reaches its time limit
# saves, is queued again and continues: SLURM signals the batch script (--signal there), that signals the ranks,
# and they save at the end of their step (--exit-signal-handler). The signal is SIGINT: the processes that a rank
# started, and needs for saving, get it as well, and SIGTERM would end them.

set -euo pipefail

if [[ "${DRY_RUN:-0}" == 1 && -z "${SLURM_JOB_ID:-}" ]]; then # outside a job: one node, whose name is not known yet
    SLURM_JOB_ID=0 SLURM_JOB_NUM_NODES="${SLURM_JOB_NUM_NODES:-1}" MASTER_ADDR="${MASTER_ADDR:-FIRST_NODE}"
fi

: "${SCRIPT:?set it to the training script, such as Megatron-LM/pretrain_gpt.py}"
: "${PYTHON:=python3}"
: "${GPUS_PER_NODE:=${SLURM_GPUS_ON_NODE:-8}}"
: "${MASTER_ADDR:=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}"
: "${MASTER_PORT:=$((20000 + SLURM_JOB_ID % 10000))}"

export MASTER_ADDR MASTER_PORT
# One hardware queue: Megatron demands it for tensor and context parallelism below Blackwell, and pipeline messages
# are placed so that one is enough (docs/gpu.md).
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# How long torchrun lets its ranks save before it kills them; a little less than the signal is early.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-540}"

container=()
if [[ -n "${CONTAINER:-}" ]]; then
    container=("--container-image=$CONTAINER" "--container-workdir=$PWD")
    if [[ -n "${MOUNTS:-}" ]]; then
        container+=("--container-mounts=$MOUNTS")
    fi
fi

interrupted=0
step=0

interrupt() {
    interrupted=1
    scancel --signal=INT "$SLURM_JOB_ID.0" # the ranks alone, by their step
}

# Run a step of the job, with the ranks' command as arguments, and queue the job again if time ran out.
run() {
    local command=(srun --kill-on-bad-exit=1 --label "${container[@]}" "$@")
    if [[ "${DRY_RUN:-0}" == 1 ]]; then
        printf '%q ' "${command[@]}"
        printf '\n'
        return
    fi
    trap interrupt USR1
    "${command[@]}" &
    step=$!
    local status=0
    wait "$step" || status=$?
    # A signal ends the waiting, not the step.
    while kill -0 "$step" 2>/dev/null; do
        status=0
        wait "$step" || status=$?
    done
    if ((interrupted)); then
        scontrol requeue "$SLURM_JOB_ID"
        return
    fi
    return "$status"
}
