"""A V with both ends on the last rank (``--pipeline-loss-rank last``) trains as stock does, bit for bit."""

from itertools import product
from pathlib import Path

import pytest
import torch

from megatron_pp_ext.compiler.limits import at_most
from megatron_pp_ext.features.offload import megatron
from megatron_pp_ext.features.offload.runtime.offloaded_activations import OffloadedActivations
from megatron_pp_ext.megatron.trainer.layer_seeds import FLAG as LAYER_SEEDS
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.formats import csv_file
from megatron_pp_ext.schedule.placement import LAST, v, wave
from megatron_pp_ext.schedule.simulate import simulate
from tests.support.comparison import (
    assert_close,
    assert_same_bits,
    assert_same_gradients,
    assert_same_predictions,
    run,
    stock,
    traced,
)
from tests.support.flags import PP4, estimated_costs, read
from tests.support.tiers import wide
from tests.support.training import global_parameters, train

PIPELINE = "--pipeline-model-parallel-size"
PP2, UNTIED = f"{PIPELINE} 2", "--untie-embeddings-and-output-weights"
LAST_RANK = "--pipeline-loss-rank last"
V_HALF = f"--pipeline-schedule v-half {LAST_RANK}"
EXPERTS = (
    "--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 --disable-bias-linear "
    "--moe-token-dispatcher-type alltoall --bf16 --accumulate-allreduce-grads-in-fp32 --clip-grad 0"
)
PREDICTION = "--mtp-num-layers 1 --position-embedding-type rope"

LAYOUTS = {
    "pp2-tied": (2, PP2),
    "pp3-odd-microbatches": (3, f"{PIPELINE} 3 --num-layers 6 --global-batch-size 7"),
    "pp4-untied": (4, f"{PIPELINE} 4 {UNTIED}"),
    "pp4-tied": (4, f"{PIPELINE} 4"),
    "tp2-pp2-per-token": (4, f"{PP2} --tensor-model-parallel-size 2 --calculate-per-token-loss"),
    "pp2-dp2-distributed": (
        4,
        f"{PP2} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
}
FAMILIES = ("v-half", "v-min", "v-zb", "dualpipe-v", "1f1b-v")
ALWAYS = {("v-zb", "pp3-odd-microbatches"), ("dualpipe-v", "pp4-untied")}


@pytest.mark.parametrize(
    ("name", "layout"), [case if case in ALWAYS else wide(case) for case in product(FAMILIES, LAYOUTS)]
)
def test_same_bits_as_stock(name: str, layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    ours = run(world_size, f"{flags} --pipeline-schedule {name} {LAST_RANK}".split())
    assert_same_bits(ours, stock(world_size, *flags.split()))


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        wide((2, f"{PP2} --eval-interval 1 --eval-iters 2 --clip-grad 0")),
        wide((2, f"{PP2} {PREDICTION} {UNTIED} --bf16")),
        wide(
            (2, f"{PP2} {UNTIED} --bf16 --swiglu --normalization RMSNorm --recompute-granularity selective")
        ),
    ],
)
def test_other_models(world_size: int, flags: str) -> None:
    """Evaluations in the middle of training, predictions of several tokens, half precision."""
    ours, theirs = run(world_size, f"{flags} {V_HALF}".split()), stock(world_size, *flags.split())
    assert_same_bits(ours, theirs)
    assert ours.validation == theirs.validation
    assert [step.keys() for step in ours.logged] == [step.keys() for step in theirs.logged]


@pytest.mark.parametrize("tied", [wide(""), UNTIED])
@pytest.mark.parametrize(
    ("layout", "stages"), [("Ett|ttt|tttm|L", "Ettt|tttttm|L"), wide(("Ett|ttt|ttt|mL", "Etttt|ttttmL"))]
)
def test_predictions_of_several_tokens(tied: str, layout: str, stages: str) -> None:
    """With a copy of the embedding on the first rank, where Megatron's own sum would not look for it.

    Stock has the same layers with the loss: with MTP there, a tied output layer has a weight that it never
    uses.
    """
    flag, model = "--pipeline-model-parallel-layout", f"{PREDICTION} {tied}"
    ours = run(2, f"{PP2} {model} {flag} {layout} {V_HALF}".split())
    ranks = stages.count("|") + 1
    theirs = stock(ranks, *f"{PIPELINE} {ranks} {model} {flag} {stages}".split())
    assert_same_predictions(ours, theirs)
    if tied:
        assert_same_gradients(ours, theirs)


def test_a_shared_vocabulary() -> None:
    flags = f"{PIPELINE} 3 --num-layers 6 --global-batch-size 7"
    ours = run(3, f"{flags} {V_HALF} --pipeline-vocabulary shared".split())
    assert_close(ours, stock(3, *flags.split()))


@pytest.mark.wide
def test_activations_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    class Moving(OffloadedActivations):
        def close(self) -> None:
            super().close()
            assert self.offloaded_bytes > 0, "nothing has moved"

    monkeypatch.setattr(megatron, "SMALLEST", 1)
    monkeypatch.setattr(megatron, "OffloadedActivations", Moving)
    flags = f"{PP2} {UNTIED}"
    assert_same_bits(run(2, f"{flags} {V_HALF} --pipeline-offload 0.5".split()), stock(2, *flags.split()))


@pytest.mark.parametrize(
    "schedule",
    [wide("flex --pipeline-memory-limit 0.6-1.2"), wide("auto"), wide("flex --pipeline-memory-limit 0.75")],
)
def test_compiled_schedules(schedule: str) -> None:
    flags = f"{PP2} {UNTIED}"
    ours = run(2, f"{flags} --pipeline-schedule {schedule} {LAST_RANK}".split())
    assert_same_gradients(ours, stock(2, *flags.split()))


@pytest.mark.wide
def test_a_wave_of_four_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks 0 and 2 of every rank are mirrored, 1 and 3 are not."""
    chunks, flex = (
        "--num-virtual-stages-per-pipeline-rank 4",
        "--pipeline-schedule flex --pipeline-memory-limit",
    )
    asked = f"{PP2} {chunks} {flex} 0.75 {LAST_RANK}"
    assert read(monkeypatch, asked).placement == wave(2, 4).with_loss_on(LAST)
    assert_same_gradients(run(2, asked.split()), stock(2, *PP2.split()))


@pytest.mark.wide
def test_pairs() -> None:
    model, pairs = f"{PP2} {EXPERTS}", "--overlap-moe-expert-parallel-comm"
    ours = run(4, f"{model} {pairs} --pipeline-schedule dualpipe-v {LAST_RANK}".split())
    assert_same_bits(ours, stock(4, *f"{model} --num-layers-per-virtual-pipeline-stage 2".split()))


@pytest.mark.wide
def test_seeds_by_layer() -> None:
    flags = f"{PP2} {LAYER_SEEDS} --clip-grad 0"
    ours, theirs = (
        run(2, f"{flags} {schedule}".split(), initialize=lambda chunks: None) for schedule in (V_HALF, "")
    )
    assert_same_bits(ours, theirs)


def test_a_file_says_where_the_ends_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a file are ranks, in whichever direction, unless the flag says which."""
    file, first = tmp_path / "mine.csv", catalog.build("v-zb", 4, 8)
    for schedule in (first, first.turned_over):
        csv_file.write(schedule, file)
        for flag, expected in (("", schedule), ("first", first), ("last", first.turned_over)):
            words = f"--pipeline-schedule csv:{file} {flag and f'--pipeline-loss-rank {flag}'}"
            pipeline = read(monkeypatch, f"{PP4} {words}")
            assert pipeline.source.ordinary.orders == expected.orders
            assert pipeline.placement == expected.placement


@pytest.mark.wide
def test_a_file_trains_as_stock(tmp_path: Path) -> None:
    csv_file.write(catalog.build("v-zb", 2, 8).turned_over, tmp_path / "mine.csv")
    ours = run(2, f"{PP2} --pipeline-schedule csv:{tmp_path / 'mine.csv'}".split())
    assert_same_bits(ours, stock(2, *PP2.split()))


def test_limits_are_those_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits under flex and free bytes under auto are the real rank's, as is the rank that an error names."""
    flex = f"{PP4} --pipeline-schedule flex {LAST_RANK} --pipeline-memory-limit"
    pipeline = read(monkeypatch, f"{flex} 0.5-0.6-0.8-1.0")
    costs = estimated_costs(PP4, 8).merged(8)
    whole = 4 * costs.merged(4).stages[0].activation
    peaks = simulate(pipeline.source.ordinary, costs.merged(pipeline.placement.stages)).peak_activations
    assert all(map(at_most, peaks, [share * whole for share in (0.5, 0.6, 0.8, 1.0)]))
    auto = read(monkeypatch, f"{PP4} --pipeline-schedule auto {LAST_RANK}").source
    assert auto.placement == v(4).with_loss_on(LAST)
    least = simulate(auto.ordinary, costs).peak_memory
    free = (least[0], 2 * least[1], 3 * least[2], 3 * least[3])
    assert all(map(at_most, simulate(auto.schedule(8, free), costs).peak_memory, free))
    with pytest.raises(ValueError, match="of rank 0 is infeasible"):
        read(monkeypatch, f"{flex} 0.01-1-1-1")


def _ends(chunks: list[torch.nn.Module]) -> list[torch.Tensor]:
    named = [(name, one) for name, one in global_parameters(chunks)]
    return [one.detach().clone() for name, one in named if name == "embedding.word_embeddings.weight"]


@pytest.mark.wide
def test_the_last_rank_has_both_ends_and_the_losses() -> None:
    """A tied output layer starts as the embedding; the trace has the ranks that ran."""
    flags = f"{PP2} {V_HALF} --train-iters 1"
    ranks = train(2, flags.split(), initialize=lambda chunks: None, grab=_ends)
    assert [len(rank.grabbed) for rank in ranks] == [0, 2]
    assert torch.equal(*ranks[1].grabbed) and ranks[1].grabbed[0].any()
    assert [len(rank.losses) for rank in ranks] == [0, 1]
    step = traced(2, flags.split())
    assert step.placement == v(2).with_loss_on(LAST)
    assert {event.action.stage for event in step.records[1].events} == {0, 3}
