#!/usr/bin/env bash
# Trains a tiny GPT on your own text, on two CPU ranks under V-Half: no GPU, no checkout of Megatron-LM, one minute.
# The second half of the steps goes on from the checkpoint of the first.
#
#   examples/laptop.sh [TEXT]        TEXT is a folder or a file; without it, the sources of Python's standard library
#
#   PYTHON   the interpreter in which megatron_pp_ext is installed (.venv's, or else python3)
#   OUT      where data, checkpoint and trace go (runs/laptop)
#   STEPS    training steps, an even number (40)

set -euo pipefail

if [[ -x .venv/bin/python ]]; then
    : "${PYTHON:=.venv/bin/python}"
fi
: "${PYTHON:=python3}" "${OUT:=runs/laptop}" "${STEPS:=40}"

# A layer is a stage here: V-Half gives each of the two ranks two stages.
model=(
    --num-layers 4 --hidden-size 128 --num-attention-heads 4
    --seq-length 128 --max-position-embeddings 128
)
# Eight microbatches of two sequences each.
training=(
    --micro-batch-size 2 --global-batch-size 16 --train-iters "$STEPS"
    --lr 0.002 --lr-decay-style constant --clip-grad 1.0
    --log-interval 5 --eval-interval "$STEPS" --eval-iters 2
)
# Every byte is a token. Of the text, 90% is trained on, and 5% each are for validation and test.
data=(--data-path "$OUT/data/text" --split '90,5,5' --tokenizer-type NullTokenizer --vocab-size 257)
pipeline=(--pipeline-model-parallel-size 2 --pipeline-schedule v-half --pipeline-trace "$OUT/trace.json")
checkpoints=(--save "$OUT/checkpoints" --load "$OUT/checkpoints" --save-interval "$((STEPS / 2))")

# train LOG FLAGS...: train with all that Megatron prints in LOG, of which only the losses are shown.
train() {
    local log="$1"
    shift
    echo "training; what Megatron prints goes to $log"
    "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 -m megatron_pp_ext.pretrain_gpt --cpu \
        "${model[@]}" "${training[@]}" "${data[@]}" "${pipeline[@]}" "${checkpoints[@]}" "$@" 2>&1 |
        tee "$log" |
        awk -F'|' '/iteration .*lm loss:/ { for (i = 2; i < NF; i++) if ($i ~ /lm loss:/) { sub(/.*iteration/, "iteration", $1)
                print $1 $i; fflush() } }
            /loss at iteration/ { print $1 $2; fflush() }' || {
        echo "training failed: the reason is in $log" >&2
        exit 1
    }
}

if [[ -e "$OUT/checkpoints" ]]; then
    echo "$OUT/checkpoints is of an earlier run: delete it, or set OUT to another folder" >&2
    exit 2
fi
export OMP_NUM_THREADS=1
"$PYTHON" -W ignore::UserWarning -m megatron_pp_ext.text_data ${1:+"$1"} "$OUT/data/text"
train "$OUT/first-half.log" --exit-interval "$((STEPS / 2))"
train "$OUT/second-half.log"
# What both ranks really did in the last step, as text and as a picture.
"$PYTHON" -m megatron_pp_ext.cli trace "$OUT/trace.json" --png "$OUT/step.png"
