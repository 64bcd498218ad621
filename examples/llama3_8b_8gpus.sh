#!/usr/bin/env bash
# Trains a model of the size of Llama 3 8B on one node of 8 GPUs with 80 GB each: four pipeline ranks under V-ZB, each
# of two tensor-parallel GPUs, with a vocabulary that all ranks share. The trace of the last step opens with "mpp trace"
# and in Perfetto.
#
#   examples/llama3_8b_8gpus.sh [MORE FLAGS...]
#
#   MEMORY_LIMIT   a fraction of the activations that 1F1B keeps, such as 0.8: a schedule is compiled that
#                  stays within it, instead of V-ZB (none)
#   PYTHON         the interpreter in which megatron_pp_ext is installed (python3)
#   SCRIPT         the pretrain_gpt.py of your Megatron-LM checkout (this package's own)
#   DATA, TOKENIZER, OUT, DRY_RUN as in common.sh

set -euo pipefail

: "${PYTHON:=python3}" "${OUT:=runs/llama3-8b}"
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

model=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000 --rotary-percent 1.0
    --swiglu --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0
    --vocab-size 128256 --untie-embeddings-and-output-weights
)
parallel=(
    --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
training=(
    --bf16 --micro-batch-size 1 --global-batch-size 64 --train-iters 1000
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 50
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --log-interval 10 --eval-interval 500 --eval-iters 10
    --save "$OUT/checkpoints" --load "$OUT/checkpoints" --save-interval 500
)
if [[ -n "${MEMORY_LIMIT:-}" ]]; then
    pipeline=(--pipeline-schedule flex --pipeline-memory-limit "$MEMORY_LIMIT")
else
    pipeline=(--pipeline-schedule v-zb --pipeline-vocabulary auto)
fi
pipeline+=(--pipeline-trace "$OUT/trace.json")

# With tensor parallelism Megatron demands one hardware queue on GPUs before Blackwell.
command=(
    env CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=1
    "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 8
)
if [[ -n "${SCRIPT:-}" ]]; then
    command+=(-m megatron_pp_ext "$SCRIPT")
else
    command+=(-m megatron_pp_ext.pretrain_gpt)
fi
command+=("${model[@]}" "${parallel[@]}" "${training[@]}" "${data[@]}" "${pipeline[@]}" "$@")

if is_true DRY_RUN; then
    print_command "${command[@]}"
else
    mkdir -p "$OUT"
    exec "${command[@]}"
fi
