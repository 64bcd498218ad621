#!/usr/bin/env bash
# Trains a model of the size of Mixtral 8x7B on 4 nodes of 8 GPUs with 80 GB each, as a SLURM job. Each node is a
# pipeline rank under V-ZB, with a vocabulary that all ranks share. In it each GPU holds one of every layer's 8
# experts, so tokens travel to their experts inside the node, and the 8 GPUs are data-parallel for the rest of the
# layer.
#
#   examples/mixtral_8x7b_32gpus.sh [MORE FLAGS...]
#
#   CONTAINER   an image for pyxis in which megatron_pp_ext is installed (none)
#   SCRIPT      the pretrain_gpt.py of your Megatron-LM checkout (this package's own)
#   DATA, TOKENIZER, OUT, DRY_RUN as in common.sh
#
# docs/slurm.md lists what else can be set.

set -euo pipefail

: "${OUT:=runs/mixtral-8x7b}"
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

model=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 4096 --max-position-embeddings 4096
    --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0
    --swiglu --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0
    --vocab-size 32000 --untie-embeddings-and-output-weights
)
experts=(
    --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
)
parallel=(
    --expert-model-parallel-size 8 --pipeline-model-parallel-size 4
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
training=(
    --bf16 --micro-batch-size 1 --global-batch-size 256 --train-iters 5000
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 200
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --log-interval 1 --eval-interval 1000 --eval-iters 10
    --save "$OUT/checkpoints" --load "$OUT/checkpoints" --save-interval 250
)
pipeline=(--pipeline-schedule v-zb --pipeline-vocabulary auto)

submit 4 "${model[@]}" "${experts[@]}" "${parallel[@]}" "${training[@]}" "${data[@]}" "${pipeline[@]}" "$@"
