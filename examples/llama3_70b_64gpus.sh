#!/usr/bin/env bash
# Trains a model of the size of Llama 3 70B on 8 nodes of 8 GPUs with 80 GB each: a SLURM job in a container. Four
# GPUs share tensors, so that two of the eight pipeline ranks of each of the two replicas are in a node. The schedule is
# V-Half with a shared vocabulary, which fits with the most memory to spare (benchmarks/results/named_jobs.md). A job that
# reaches its time limit saves, is queued again and goes on.
#
#   CONTAINER=IMAGE examples/llama3_70b_64gpus.sh [MORE FLAGS...]
#
#   CONTAINER   an image for pyxis in which megatron_pp_ext is installed (docs/slurm.md shows how to make one);
#               empty runs without a container
#   MOUNTS      what the container sees (the folder in which you call this script)
#   SCRIPT      the pretrain_gpt.py of your Megatron-LM checkout (this package's own)
#   DATA, TOKENIZER, OUT, DRY_RUN as in common.sh
#
# docs/slurm.md lists what else can be set, such as NCCL's variables and a log for each rank.

set -euo pipefail

: "${CONTAINER?has to name an image, or be empty to run without a container: set it}" "${OUT:=runs/llama3-70b}"
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

model=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672
    --num-attention-heads 64 --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000 --rotary-percent 1.0
    --swiglu --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0
    --vocab-size 128256 --untie-embeddings-and-output-weights
)
parallel=(
    --tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 8
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
training=(
    --bf16 --micro-batch-size 1 --global-batch-size 128 --train-iters 5000
    --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine --lr-warmup-iters 200
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --log-interval 1 --eval-interval 1000 --eval-iters 10
    --save "$OUT/checkpoints" --load "$OUT/checkpoints" --save-interval 250
)
pipeline=(--pipeline-schedule v-half --pipeline-vocabulary auto)

submit 8 "${model[@]}" "${parallel[@]}" "${training[@]}" "${data[@]}" "${pipeline[@]}" "$@"
