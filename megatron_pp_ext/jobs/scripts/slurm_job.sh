# shellcheck shell=bash
# The common part of both batch scripts, which source it. Settings, in the environment of sbatch (docs/slurm.md):
#
#   SCRIPT         the training script, such as Megatron-LM/pretrain_gpt.py (this package's own pretrain_gpt)
#   PYTHON         the interpreter in which megatron_pp_ext is installed (python3)
#   GPUS_PER_NODE  ranks a node (what SLURM gave the job, else 8)
#   MASTER_PORT    (by job number)
#   CONTAINER      an image for pyxis
#   MOUNTS         what the container sees, as in --container-mounts (the working folder, under its own path)
#   RANK_LOGS      a folder that gets the output of each rank as rank-NUMBER.log, beside the job's own log (none)
#   DRY_RUN        1, yes, true or on prints the command instead of running it
#
# All other variables reach the ranks too, those of NCCL also where the container's image sets its own.
#
# Arguments are the training script's. With --save and --load on one folder a job that reaches its time limit
# saves, is queued again and continues: SLURM signals the batch script (--signal there), that signals the ranks,
# and they save at the end of their step (--exit-signal-handler). The signal is SIGINT: the processes that a rank
# started, and needs for saving, get it as well, and SIGTERM would end them. A job that saved nothing new would do
# the same again, for ever, and is not queued again.

set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=print_command.sh
source "$(dirname "${BASH_SOURCE[0]}")/print_command.sh"

# The signal that SLURM sends ahead of the time limit may come at any moment, also before the ranks are there.
interrupted=0
step=0

interrupt() {
    interrupted=1
    # The ranks alone are told, by their step, which srun makes a moment after it has started.
    while ((step)) && kill -0 "$step" 2>/dev/null && ! scancel --signal=INT "$SLURM_JOB_ID.0" 2>/dev/null; do
        sleep 1
    done
}

trap interrupt USR1

dry_run=0
if is_true DRY_RUN; then
    dry_run=1
fi
if [[ -z "${SLURM_JOB_ID:-}" ]]; then
    if ! ((dry_run)); then
        echo "$0 has to run as a job: submit it with sbatch, or set DRY_RUN=1 to see its command" >&2
        exit 2
    fi
    # Outside a job the nodes have no names yet.
    SLURM_JOB_ID=0 SLURM_JOB_NUM_NODES="${SLURM_JOB_NUM_NODES:-1}" MASTER_ADDR="${MASTER_ADDR:-FIRST_NODE}"
fi

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
export PYTHONUNBUFFERED="${PYTHONUNBUFFERED:-1}"
exported=(
    MASTER_ADDR MASTER_PORT CUDA_DEVICE_MAX_CONNECTIONS OMP_NUM_THREADS TORCH_ELASTIC_SHUTDOWN_TIMEOUT PYTHONUNBUFFERED
)

container=()
if [[ -n "${CONTAINER:-}" ]]; then
    container=("--container-image=$CONTAINER" "--container-mounts=${MOUNTS:-$PWD:$PWD}" "--container-workdir=$PWD")
    # A container takes over all variables, except those that its image sets to something else.
    mapfile -t network < <(compgen -e | grep -E '^(TORCH_)?NCCL_' || true)
    if ((${#network[@]})); then
        container+=("--container-env=$(IFS=, && echo "${network[*]}")")
    fi
fi

# What a rank runs: this package in front of the script, whose arguments follow.
rank=("$PYTHON" -m)
if [[ -n "${SCRIPT:-}" ]]; then
    rank+=(megatron_pp_ext "$SCRIPT")
else
    rank+=(megatron_pp_ext.pretrain_gpt)
fi
if [[ -n "${RANK_LOGS:-}" ]]; then
    # A shell that has the output copied into a file, and then becomes the rank. SIGINT, which makes the rank save,
    # reaches tee as well, and must not end it.
    # shellcheck disable=SC2016
    rank=(bash -c 'exec > >(exec tee -ia "$0/rank-$RANK.log") 2>&1; exec "$@"' "$RANK_LOGS" "${rank[@]}")
fi

# The folder that --save names among the script's arguments, of which the last counts.
save=""
for ((at = 1, next = 2; at <= $#; at++, next++)); do
    case "${!at}" in
        --save) save="${!next:-}" ;;
        --save=*) save="${!at#--save=}" ;;
    esac
done

# Print the step of the newest checkpoint there, 0 without one.
saved() {
    local newest
    newest="$(cat "$save/latest_checkpointed_iteration.txt" 2>/dev/null || true)"
    [[ "$newest" =~ ^[0-9]+$ ]] || newest=0
    echo "$newest"
}

# Queue the job again, if it has saved more than the step that it began with, which is the argument.
queue_again() {
    local problem
    if [[ -z "$save" ]]; then
        problem="it has no --save, and would start from nothing: give --save and --load one folder"
    elif (($(saved) <= $1)); then
        problem="it has trained and saved no step since it started (the newest in $save is $1), and would do so\
 for ever: give sbatch a longer --time, of which the last ten minutes are for saving, and --load the folder of --save"
    else
        scontrol requeue "$SLURM_JOB_ID"
        return
    fi
    echo "job $SLURM_JOB_ID is not queued again: $problem" >&2
    return 1
}

# Run a step of the job, with the ranks' command as arguments, and queue the job again if time ran out.
run() {
    local command=(srun --kill-on-bad-exit=1 --label "${container[@]}" "$@")
    if ((dry_run)); then
        local name settings=()
        for name in "${exported[@]}"; do
            settings+=("$name=${!name}")
        done
        print_command export "${settings[@]}"
        print_command "${command[@]}"
        return
    fi
    if [[ -n "${RANK_LOGS:-}" ]]; then
        mkdir -p "$RANK_LOGS"
    fi
    local status=0 before
    before="$(saved)"
    "${command[@]}" &
    step=$!
    if ((interrupted)); then
        interrupt
    fi
    wait "$step" || status=$?
    # A signal ends the waiting, not the step.
    while kill -0 "$step" 2>/dev/null; do
        status=0
        wait "$step" || status=$?
    done
    if ((interrupted)); then
        queue_again "$before"
        return
    fi
    return "$status"
}
