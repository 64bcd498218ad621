"""Layouts with the loss or multi-token prediction in a stage of its own train as stock does.

Where a V has its stages, stock's interleaved schedule would have the prediction on the first rank, whose copy
of the embedding it does not keep equal.  So every case is compared with the same model on stock's line.
"""

import functools

import pytest
import torch

from megatron_pp_ext.schedule.placement import Shape
from tests.support import rounding
from tests.support.comparison import (
    Result,
    assert_close,
    assert_same_gradients,
    assert_same_predictions,
    run,
    stock,
)
from tests.support.flags import read
from tests.support.tiers import first
from tests.support.training import global_parameters, since, train

PIPELINE, LAYOUT = "--pipeline-model-parallel-size", "--pipeline-model-parallel-layout"
EVALUATED = ("--clip-grad", "0", "--eval-iters", "1", "--eval-interval", "2")
PREDICTION = ("--mtp-num-layers", "1", "--position-embedding-type", "rope")
UNTIED = "--untie-embeddings-and-output-weights"
FLEX = "flex --pipeline-memory-limit 0.75"


RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
RECOMPUTES = since((0, 19), "megatron-core 0.18 fails to recompute multi-token prediction")


by_ends = pytest.mark.parametrize(
    "model", [(), pytest.param((UNTIED,), marks=pytest.mark.wide)], ids=["tied", "untied"]
)


def ours(ranks: int, layout: str, schedule: str, *model: str) -> Result:
    flags = (PIPELINE, str(ranks), LAYOUT, layout, "--pipeline-schedule", *schedule.split())
    return run(ranks, [*flags, *EVALUATED, *model])


@pytest.mark.parametrize(
    ("ranks", "layout", "schedule"),
    first(
        1,
        [
            # A stage with nothing in it but what it is handed.
            (4, "Et*4|t*4||L", "zb-h1"),
            (2, "Et*4||t*4|L", "v-half"),
            (2, "Et*8|L", "1f1b"),
            (4, "E|t|t|tt|t|t|tt|L", FLEX),
        ],
    ),
)
@by_ends
def test_the_loss_alone(ranks: int, layout: str, schedule: str, model: tuple[str, ...]) -> None:
    result = ours(ranks, layout, schedule, *model)
    theirs = stock(ranks, PIPELINE, str(ranks), *EVALUATED, *model)
    assert_same_gradients(result, theirs)
    assert result.validation == pytest.approx(theirs.validation, rel=rounding.of_losses(updates=3))


@pytest.mark.wide
@by_ends
def test_the_loss_alone_beside_a_shared_vocabulary(model: tuple[str, ...]) -> None:
    shared = ours(4, "E|t|t|tt|t|t|tt|L", "v-half", "--pipeline-vocabulary", "shared", *model)
    assert_close(shared, stock(4, PIPELINE, "4", *EVALUATED, *model))


@pytest.mark.parametrize(
    ("ranks", "layout", "schedule"),
    first(
        1,
        [
            (2, "Et*4|t*4|m|L", "v-half"),
            (4, "Et*6|t*2m||L", "zb-h1"),
            (4, "Et|t|t|t|t|ttt|m|L", "interleaved"),
            (2, "Ett|t|t|t|tt|t|m|L", FLEX),
            (2, "Et*8m|L", "zb-h1"),
            (4, "Et|t|t|t|ttttm|||L", "v-zb"),
        ],
    ),
)
@by_ends
def test_the_prediction_alone(ranks: int, layout: str, schedule: str, model: tuple[str, ...]) -> None:
    flags = (*PREDICTION, *model)
    theirs = stock(4, PIPELINE, "4", LAYOUT, "Et*4|t*4|m|L", *EVALUATED, *flags)
    assert_same_predictions(ours(ranks, layout, schedule, *flags), theirs)


def test_flex_takes_no_loop_with_the_prediction_on_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"{PIPELINE} 2 {LAYOUT} Ett|t|t|t|tt|t|m|L {' '.join(PREDICTION)} --pipeline-schedule {FLEX}"
    request = read(monkeypatch, flags).request
    assert {placement.shape for placement in request.placements} == {Shape.WAVE}


@pytest.mark.parametrize(
    ("world", "layout", "schedule", "model"),
    first(
        0,
        [
            (4, "Et*8m|L", "zb-h1", "--tensor-model-parallel-size 2 --sequence-parallel"),
            (2, "Et*4|t*4|mm|L", "v-half", "--mtp-num-layers 2 --calculate-per-token-loss"),
            (4, "Et*4|t*4|m|L", "v-half", "--use-distributed-optimizer --overlap-grad-reduce"),
            pytest.param(2, "Et*4|t*4|m|L", "v-zb", RECOMPUTED, marks=RECOMPUTES),
            (2, "Et*4|t*4|m|L", "v-half", "--num-experts 4 --disable-bias-linear --moe-router-topk 2"),
        ],
    ),
)
def test_the_prediction_alone_beside(world: int, layout: str, schedule: str, model: str) -> None:
    """Against stock with the loss alone on the second rank, and as many replicas or tensor-parallel ranks."""
    flags = [*EVALUATED, *PREDICTION, *model.split()]
    theirs = stock(world, PIPELINE, "2", LAYOUT, f"Et*8{'m' * layout.count('m')}|L", *flags)
    result = run(world, [PIPELINE, "2", LAYOUT, layout, "--pipeline-schedule", schedule, *flags])
    assert_same_predictions(result, theirs)


def _require_copies(count: int, chunks: list[torch.nn.Module]) -> None:
    """Megatron's own initial weights: every copy starts as what the first stage embeds with."""
    mine = [p.detach() for name, p in global_parameters(chunks) if name == "embedding.word_embeddings.weight"]
    gathered: list[list[torch.Tensor]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(gathered, mine)
    copies = [copy for one in gathered for copy in one]
    assert len(copies) == count
    assert copies[0].any()
    assert all(torch.equal(copy, copies[0]) for copy in copies)


@pytest.mark.parametrize(
    ("ranks", "schedule", "model", "copies"), [(2, "v-half", (), 3), (4, "zb-h1", (UNTIED,), 2)]
)
def test_all_copies_start_with_the_embedding(
    ranks: int, schedule: str, model: tuple[str, ...], copies: int
) -> None:
    flags = (PIPELINE, str(ranks), LAYOUT, "Et*4|t*4|m|L", "--pipeline-schedule", schedule, *PREDICTION)
    require = functools.partial(_require_copies, copies)
    train(ranks, [*flags, *model, "--train-iters", "1"], initialize=require)
