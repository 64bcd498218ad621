"""Training runs on two CPU ranks, a core and a thread each, that benchmarks start and listen to."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

RANKS, TOKENS = 2, 256
COMMON = shlex.split(
    f"--pipeline-model-parallel-size {RANKS} --micro-batch-size 1 --num-layers 8 --num-attention-heads 8 "
    f"--seq-length {TOKENS} --max-position-embeddings {TOKENS} --attention-dropout 0 --hidden-dropout 0 "
    "--lr 1e-3 --lr-decay-style constant --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 1 "
    "--mock-data --eval-iters 0 --eval-interval 1000 --log-interval 1"
)
"""A GPT but for its hidden size and vocabulary, batch and schedule."""


@contextmanager
def two_cores() -> Iterator[None]:
    """Let what is started inside share as many cores as there are ranks."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:RANKS])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def call(words: Sequence[str]) -> str:
    """Run a command with a thread a process; what it printed, or the end of the benchmark."""
    run = subprocess.run(
        words, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if run.returncode:
        raise SystemExit(f"{shlex.join(words)}\n{run.stdout[-3000:]}{run.stderr[-3000:]}")
    return run.stdout


def pretrain(flags: Sequence[str]) -> str:
    """Train with ``flags`` on all ranks; the log."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    return call([sys.executable, *launcher, "-m", "megatron_pp_ext.pretrain_gpt", "--cpu", *flags])
