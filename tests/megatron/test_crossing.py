"""A checkpoint goes on under another schedule, placement or size, with the state of its optimizer.

Every case trains four steps with a checkpoint in the middle; all its readers take the last two again.
Gradients are not clipped, which would bring the last bits of a norm summed rank by rank into the weights.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import rounding
from tests.support.tiers import wide
from tests.support.training import train

STEPS = "--ckpt-format torch_dist --train-iters 4 --global-batch-size 4 --clip-grad 0"
BUCKETS = "--overlap-grad-reduce --ddp-bucket-size 2000"
"""Several on every rank, as real models have; not all of them fill what Megatron pads them to."""
UNTIED = "--untie-embeddings-and-output-weights"
RESHARDABLE = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
SHARED = "--pipeline-vocabulary shared"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
PREDICTION = "--mtp-num-layers 1 --position-embedding-type rope"
LAYOUT = "--pipeline-model-parallel-layout"


class Job(NamedTuple):
    """A job that saves a checkpoint, or goes on from one; ``flags`` stand behind those of the model."""

    ranks: int
    pipeline: int
    flags: str = ""

    def losses(self, model: str, *more: str) -> list[float]:
        flags = f"{STEPS} --pipeline-model-parallel-size {self.pipeline} {model} {self.flags}"
        return train(self.ranks, [*flags.split(), *more])[-1].losses


class Case(NamedTuple):
    """A model, who saves it, and who goes on to the last bit, or but for the order of sums."""

    model: str
    writer: Job
    exact: tuple[Job, ...] = ()
    close: tuple[Job, ...] = ()


def under(schedule: str, pipeline: int = 4, replicas: int = 1, flags: str = "") -> Job:
    return Job(pipeline * replicas, pipeline, f"--pipeline-schedule {schedule} {flags}")


LINE = Job(4, 4)
LOOP = Job(4, 4, "--num-virtual-stages-per-pipeline-rank 2")
V = under("v-half")
LAST = "--pipeline-loss-rank last"
LAST_V = under("v-half", flags=LAST)
MODELS = {
    "tied": BUCKETS,
    "untied": f"{UNTIED} {BUCKETS}",
    "distributed": f"{UNTIED} {BUCKETS} {RESHARDABLE}",
}
TP2 = "--tensor-model-parallel-size 2"
# Two replicas, whose state of the optimizer is cut otherwise than a single one's.
LINE_2, LOOP_2, V_2, LAST_V_2 = (Job(4, 2, flags) for flags in ("", LOOP.flags, V.flags, LAST_V.flags))
SHARED_V = under("v-half", flags=SHARED)
SHARED_V_2 = under("v-half", pipeline=2, flags=SHARED)
SHARED_READERS = (SHARED_V, under("zb-h1", pipeline=2, flags=SHARED))
OTHER_READERS = (LINE, Job(4, 2, f"{TP2} --make-vocab-size-divisible-by 1"), under("v-half", pipeline=2))
ROWS = "--vocab-size 65"
"""No multiple of the ranks, nor of 128."""
LOSS_ALONE = under("zb-h1", flags=f"{LAYOUT} Et*4|t*4|m|L")
LOSS_ALONE_IN_A_V = under("v-half", pipeline=2, flags=f"{LAYOUT} Et*4|t*4|m|L")

CASES = {
    "stock": Case(BUCKETS, Job(2, 2), (under("v-half", pipeline=2),)),
    "two-replicas": Case(f"{BUCKETS} {RESHARDABLE}", V_2, close=(under("zb-h1"),)),
    "shared-vocabulary": Case(f"{UNTIED} {BUCKETS}", SHARED_V_2, (SHARED_V_2,), (Job(2, 2),)),
    "v-to-turned-v": Case(BUCKETS, under("v-half", pipeline=2), (under("v-half", pipeline=2, flags=LAST),)),
    # A tied embedding is a bucket of its own, also without a flag for buckets.
    "tied-bucket": Case(f"--num-layers 4 {ROWS} {RESHARDABLE}", LINE_2, (LINE_2,)),
}
"""What every run of the tests has; the others are wide."""


def others() -> Iterator[tuple[str, Case]]:
    yield "v", Case(BUCKETS, under("v-half", pipeline=2), (Job(2, 2),), (under("zb-h1"),))
    # Loaded in parallel both copies of a tied weight get one tensor; Adam would then move its moments twice.
    parallel = V_2._replace(flags=f"{V.flags} --ckpt-fully-parallel-load")
    yield "parallel-load", Case(BUCKETS, V_2, (parallel,))
    for name, model in MODELS.items():
        yield f"v-{name}", Case(model, V, (LINE, LOOP), (under("zb-h1", pipeline=2),))
        yield f"interleaved-{name}", Case(model, LOOP, (V,))
    for name, model in MODELS.items():
        yield f"turned-v-{name}", Case(model, LAST_V, (V, LINE, LOOP, LAST_V))
        yield f"v-to-turned-v-{name}", Case(model, V, (LAST_V,))
    yield "two-replicas-turned-v", Case(f"{BUCKETS} {RESHARDABLE}", LAST_V_2, (V_2, LAST_V_2, LOOP_2))
    yield "stock-to-turned-shared", Case(UNTIED, LINE, close=(under("v-half", flags=f"{SHARED} {LAST}"),))
    flex = under("flex --pipeline-memory-limit 0.8", pipeline=2)
    yield "same-flex", Case(BUCKETS, flex, (flex,))
    fewer = (Job(2, 2, LOOP.flags), Job(4, 1), LINE_2)
    yield "two-replicas-v", Case(f"{BUCKETS} {RESHARDABLE}", V_2, (LOOP_2,), fewer)
    yield "two-replicas-loop", Case(f"{BUCKETS} {RESHARDABLE}", LOOP_2, (V_2,))
    for flags, reader in (
        ("--ddp-bucket-size 2000", "--ddp-bucket-size 5000"),
        ("--ddp-num-buckets 3 --distrib-optim-fully-reshardable-mem-efficient", ""),
    ):
        model = f"--overlap-grad-reduce {RESHARDABLE}"
        yield f"buckets {flags}", Case(model, Job(4, 2, flags), (Job(4, 2, reader),))
    tensor, tensor_v = Job(4, 2, TP2), Job(4, 2, f"{TP2} {V.flags}")
    for name, writer, reader in (("line-to-v", tensor, V), ("v-to-line", tensor_v, LINE)):
        yield f"tensor-{name}", Case(f"{BUCKETS} {RESHARDABLE}", writer, close=(reader,))
    for name, model in {**MODELS, "odd": f"{UNTIED} {ROWS}"}.items():
        yield f"stock-to-shared-{name}", Case(model, LINE, close=SHARED_READERS)
        readers = OTHER_READERS[::2] if name == "odd" else OTHER_READERS
        yield f"shared-{name}", Case(model, SHARED_V, (SHARED_V,), (SHARED_READERS[1], *readers))
    for model in (f"{PREDICTION} {RESHARDABLE}", f"{PREDICTION} {UNTIED}"):
        yield f"to-v {model}", Case(model, LOSS_ALONE, close=(LOSS_ALONE_IN_A_V,))
        yield f"from-v {model}", Case(model, LOSS_ALONE_IN_A_V, close=(LOSS_ALONE,))
    dropped = under("v-half", pipeline=2)
    yield "dropout", Case(DROPOUT, dropped, (dropped,))


def by_name(name: str, case: Case) -> object:
    return pytest.param(case, id=name)


@pytest.mark.parametrize(
    "case", [*(by_name(*case) for case in CASES.items()), *(wide(by_name(*case)) for case in others())]
)
def test_goes_on_where_it_was(case: Case, tmp_path: Path) -> None:
    whole = case.writer.losses(case.model, "--save", str(tmp_path), "--save-interval", "2")
    load = ("--load", str(tmp_path), "--ckpt-step", "2")
    for reader in case.exact:
        assert reader.losses(case.model, *load) == whole[2:], reader
    for reader in case.close:
        within = rounding.of_losses(updates=1)
        assert reader.losses(case.model, *load) == pytest.approx(whole[2:], rel=within), reader


@pytest.mark.wide
def test_without_its_optimizer_it_goes_on_otherwise(tmp_path: Path) -> None:
    """So that the state of the optimizer decides what the cases above compare."""
    whole = SHARED_V.losses(UNTIED, "--save", str(tmp_path), "--save-interval", "2")
    forgetful = SHARED_V.losses(UNTIED, "--load", str(tmp_path), "--ckpt-step", "2", "--no-load-optim")
    assert forgetful[1] != pytest.approx(whole[3], rel=rounding.of_losses(updates=1))
