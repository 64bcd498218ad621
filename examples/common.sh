# shellcheck shell=bash disable=SC2034
# What the examples on GPUs share; they source this file. Settings, in the environment:
#
#   DATA        prefix of data in Megatron's format, as its tools/preprocess_data.py writes them (random tokens)
#   TOKENIZER   with DATA: the folder or name of the Hugging Face tokenizer that made them
#   OUT         where checkpoints and traces go (runs/NAME)
#   DRY_RUN     1 prints the command instead of running it

examples="$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source-path=SCRIPTDIR source=../megatron_pp_ext/jobs/scripts/print_command.sh
source "$examples/../megatron_pp_ext/jobs/scripts/print_command.sh"

if [[ -n "${DATA:-}" ]]; then
    : "${TOKENIZER:?has to name the Hugging Face tokenizer that made DATA: set it}"
    data=(--data-path "$DATA" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
else
    data=(--mock-data --tokenizer-type NullTokenizer)
fi

# submit NODES FLAGS...: train on NODES nodes of a SLURM cluster, 8 GPUs each, with the settings of docs/slurm.md.
submit() {
    local nodes="$1" batch="$examples/../megatron_pp_ext/jobs/scripts/slurm_one_task_per_node.sbatch"
    shift
    if is_true DRY_RUN; then
        SLURM_JOB_NUM_NODES="$nodes" bash "$batch" "$@"
    else
        sbatch --nodes "$nodes" "$batch" "$@"
    fi
}
