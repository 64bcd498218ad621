"""Products of a W that run while the messages of an I travel: stock's numbers, to the last bit."""

from itertools import product

import pytest

from megatron_pp_ext.runtime.split import WeightGradientStore
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.timing import lenders_of
from tests.support import training
from tests.support.comparison import assert_same_bits, run, stock
from tests.support.tiers import wide

PP2_TP2 = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"
PARALLEL = f"{PP2_TP2} --sequence-parallel"
UNTIED = "--untie-embeddings-and-output-weights"
EXPERTS = (
    f"--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --disable-bias-linear {UNTIED}"
)
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CASES = {
    "sequence parallel": PARALLEL,
    "tensor parallel": PP2_TP2,
    "overlapped reduction": f"{PARALLEL} {UNTIED} --overlap-grad-reduce --use-distributed-optimizer",
    "reduced as it comes": f"{PARALLEL} --overlap-grad-reduce --no-align-grad-reduce",
    "recomputed": f"{PARALLEL} {RECOMPUTED}",
    "fp16": f"{PARALLEL} --fp16 --initial-loss-scale 256",
    "bf16": f"{PARALLEL} --bf16",
    "experts": f"{PARALLEL} {EXPERTS}",
    "exchanged tokens": f"--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 {EXPERTS}",
}
SMALL = ("--num-layers", "4", "--global-batch-size", "6")
ALWAYS = {"sequence parallel": "v-half", "overlapped reduction": "v-zb"}
SCHEDULES = ("zb-h1", "v-half", "v-zb", "zb-h2", "v-min")


@pytest.mark.parametrize(
    ("case", "schedule"),
    [
        (case, schedule) if schedule == ALWAYS.get(case) else wide((case, schedule))
        for case, schedule in product(CASES, SCHEDULES)
    ],
)
def test_same_bits_as_stock(case, schedule):
    flags = [*CASES[case].split(), *SMALL]
    ours = run(4, [*flags, "--pipeline-schedule", schedule])
    assert_same_bits(ours, stock(4, *flags))


def _count_early(chunks):
    """Count the products that run within an I, on the class since each rank has one store."""
    training.initialize_by_layer(chunks)
    stock_run = WeightGradientStore._run_beside
    WeightGradientStore.early = 0

    def counted(store, product):
        WeightGradientStore.early += product is not None
        stock_run(store, product)

    WeightGradientStore._run_beside = counted


def _early(chunks):
    return WeightGradientStore.early


def _count_exchanges(chunks):
    """Count the products that run while tokens travel."""
    training.initialize_by_layer(chunks)
    hide = WeightGradientStore.hide_exchange
    WeightGradientStore.early = 0

    def counted(store):
        WeightGradientStore.early += store.hides_exchanges
        hide(store)

    WeightGradientStore.hide_exchange = counted


def test_products_of_experts_run_while_tokens_travel():
    """They do so twice a layer; an I whose own W lends has no product before it reaches the first experts."""
    flags = f"{CASES['exchanged tokens']} --train-iters 1 --pipeline-schedule zb-h1".split()
    runs = training.train(4, flags, initialize=_count_exchanges, grab=_early)
    planned = catalog.build("zb-h1", 2, 4)
    for run_of, pipeline_rank in zip(runs, (0, 0, 1, 1), strict=True):
        lending = lenders_of(planned, pipeline_rank).items()
        own = sum(weight == input._replace(kind=Kind.W) for input, weight in lending)
        assert run_of.grabbed == 2 * 4 * len(lending) - own > 0


@pytest.mark.parametrize("schedule", ["zb-h1", wide("v-half")])
def test_products_run_within_input_gradients(schedule):
    """Two a layer and I with a lender: beside the messages of its two column-parallel layers.

    The output layer sends a message too, and so hides one more.
    """
    flags = [*PARALLEL.split(), UNTIED, "--train-iters", "1", "--pipeline-schedule", schedule]
    runs = training.train(4, flags, initialize=_count_early, grab=_early)
    planned = catalog.build(schedule, 2, 8)
    layers = 8 // planned.placement.stages
    for pipeline_rank, of_rank in enumerate((runs[:2], runs[2:])):
        lending = lenders_of(planned, pipeline_rank)
        assert lending
        heads = sum(action.stage == planned.placement.stages - 1 for action in lending)
        for one in of_rank:
            assert 0 < one.grabbed <= 2 * layers * len(lending) + heads
            assert one.grabbed >= layers * len(lending)
    assert runs[0].grabbed == runs[1].grabbed and runs[2].grabbed == runs[3].grabbed
