"""Schedules for a loop on megatron.core alone equal stock bit for bit, without megatron.training."""

import os
import pickle
import subprocess
import sys

import pytest
import torch

from megatron_pp_ext import startup_file
from megatron_pp_ext.megatron.step_numbers import BUBBLE, PEAK, PEAK_TO_PLAN, STEP_TO_PLAN
from tests.support import own_process
from tests.support.own_loop import CHUNKS, COUNTS, TIED, assert_same
from tests.support.rounding import of_losses


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What both ranks found; see ``own_loop_runs``.  MEGATRON_LM may name a checkout to run on."""
    return own_process.found("own_loop_runs", tmp_path_factory.mktemp("own_loop"))


@pytest.mark.parametrize(
    ("name", "tied"), [*((name, False) for name in CHUNKS), *((name, True) for name in TIED)]
)
def test_installed_schedules_equal_stock(found, name, tied) -> None:
    """Steps have 8, 3 and 5 microbatches; the process groups are older than the schedule."""
    assert_same([rank[name, tied] for rank in found], [rank["stock", tied] for rank in found])


def test_a_hybrid_model(found) -> None:
    if ("v-half", "hybrid") not in found[0]:
        pytest.skip("megatron-core before 0.19 builds hybrid models of Mamba layers alone")
    assert_same([rank["v-half", "hybrid"] for rank in found], [rank["stock", "hybrid"] for rank in found])


@pytest.mark.parametrize("tied", [False, True])
def test_both_ends_on_the_first_rank(found, tied: bool) -> None:
    assert_same([rank["first rank", tied] for rank in found], [rank["stock", tied] for rank in found])


@pytest.mark.parametrize("loss_rank", ["first", "last"])
@pytest.mark.parametrize(("tied", "listed"), [(False, True), (False, False), (True, True)])
def test_multi_token_prediction_before_the_last_stage(found, tied: bool, listed: bool, loss_rank) -> None:
    """All copies of the embedding start and stay equal; a tied one has a sum of three, in another order."""
    ours, stock = (
        [rank["predictions"][name, tied, form] for rank in found]
        for name, form in ((loss_rank, listed), ("stock", True))
    )
    built = [copy for _, copies in ours for copy in copies]
    assert len(built) == 2 and built[0].any() and torch.equal(*built)
    records = [record for record, _ in ours]
    trained = [one.weights["embedding.word_embeddings.weight"] for one in records]
    assert torch.equal(*trained)
    expected = [record for record, _ in stock]
    if not tied:
        assert_same(records, expected)
    for step, theirs in zip(records[-1].losses, expected[-1].losses, strict=True):
        assert step == pytest.approx(theirs, rel=of_losses(len(COUNTS)))


def test_the_core_gives_runners_where_there_is_no_trainer(found) -> None:
    """Every module is imported; the settings are those of a loop that says nothing of itself."""
    lines, kinds = zip(*found[0]["core alone"], strict=True)
    assert kinds == ("PipelineRunner",) * 3
    assert [line.partition(":")[0] for line in lines] == ["v-half", "zb-h1", "auto"]
    assert found[0]["line", "v-half"] == (
        "megatron_pp_ext: v-half: 2 ranks x 2 chunks, m = 8, peak 2 microbatches, predicted bubble 2.0% "
        "at unit costs"
    )


def test_undone_it_is_stock(found) -> None:
    assert all(rank["restored"] for rank in found)
    assert_same([rank["again"] for rank in found], [rank["stock", False] for rank in found])


def test_lengths_vary(found) -> None:
    """A trainer that announces no length says seq_length=1."""
    assert_same([rank["v-half", "lengths"] for rank in found], [rank["stock", "lengths"] for rank in found])


def test_passes_without_a_backward(found) -> None:
    """An evaluation and a pass that collects no losses come before any training step."""
    for rank in found:
        (losses, collected), (expected, values) = rank["v-half", "passes"], rank["stock", "passes"]
        assert losses == expected
        assert len(collected) == len(values)
        assert all(map(torch.equal, collected, values))
    assert len(values) == 2


def test_the_vocabulary_is_shared(found) -> None:
    """The order of sums differs, so losses are close only."""
    stock, shared = (found[-1][key].losses for key in (("stock", True), "shared"))
    for expected, actual in zip(stock, shared, strict=True):
        assert actual == pytest.approx(expected, rel=of_losses(len(COUNTS)))


def test_errors_of_a_step_name_the_argument(found) -> None:
    for rank in found:
        assert rank["collecting"].startswith('vocabulary="shared" cannot collect other data than losses')
    assert found[0]["doubling"].startswith(
        'vocabulary="shared" needs a forward step which returns what the model returns'
    )


def test_activations_wait_on_the_host_and_a_trace_is_written(found) -> None:
    records, sent = zip(*(rank["offloaded"] for rank in found), strict=True)
    assert_same(list(records), [rank["stock", False] for rank in found])
    assert all(steps and steps[0] > 0 and sorted(set(steps)) == steps for steps in sent)
    assert found[0]["trace"]


def test_models_of_one_process_have_schedules_of_their_own(found) -> None:
    several = [rank["several"] for rank in found]
    for name in ("v-half", "zb-h1"):
        assert_same([rank[name] for rank in several], [rank["stock"] for rank in several])


def test_the_trainer_gets_the_numbers_of_the_last_step(found) -> None:
    """The step of another model, that came after it, is not in them."""
    first, second = (rank["several"]["metrics"] for rank in found)
    assert first == second
    assert first.keys() == {BUBBLE, PEAK, PEAK_TO_PLAN, STEP_TO_PLAN}
    assert 0 < first[BUBBLE] < 1
    assert all(number > 0 for number in first.values())


def test_functions_tell_the_layers_of_a_model_outside_of_its_context(found) -> None:
    told = [rank["several"]["offsets"] for rank in found]
    assert told == [([3, 4, 5, 6], [3, 4, 5, 6]), ([1, 2, 7, 8], [1, 2, 7, 8])]


@pytest.mark.parametrize(
    ("what", "line"),
    [
        (
            "built before",
            "v-half cannot train this model: chunk 0 of pipeline rank 1 is stage 0, which has to",
        ),
        ("chunks", "v-half has 2 chunks a rank, and this model's config says 1; set virtual_pipeline"),
        ("one chunk", "rank 0 of the pipeline asks for a step with 1; pass the list of all chunks as model"),
        ("changed", "v-half is installed, and a model with 2 chunks on this rank was built for it; call"),
        ("left", "a model that was built for v-half is still there, and Megatron's own schedule would"),
        ("ranks", "zb-h1 was installed for 4 pipeline ranks, and this model's pipeline has 2; give"),
        ("config", "without overlap_moe_expert_parallel_comm: schedules split the backward themselves"),
        ("data parallelism", "1f1b does not support use_megatron_fsdp: FSDP reduces gradients by its"),
        ("one config", "this config has a model for v-half and is to have one for Megatron's own schedule"),
    ],
)
def test_what_cannot_train_is_refused_on_all_ranks(found, what, line) -> None:
    for rank in found:
        assert line in rank["refused"][what]
        assert "\n" not in rank["refused"][what]


def test_graphs_that_were_never_run_on_a_gpu_are_permitted_by_an_argument(found) -> None:
    for rank in found:
        assert rank["refused"]["graphs", False] == (
            "1f1b does not support cuda_graph_impl transformer_engine: graphs of its order were never run on "
            "a GPU; try scripts/gpu_check.sh graphs and add unproved=True, or leave it out"
        )
        assert rank["refused"]["graphs", True] == ""


def test_a_refused_step_changes_nothing(found) -> None:
    """A config that was handed over is refused where nothing is installed."""
    assert [rank["refused"]["still trains"] for rank in found] == ["", ""]
    made = "this model's config was made for schedule zb-h1 in another process"
    assert all(rank["arrived"].startswith(made) for rank in found)


ACTIVATED = """
import pickle, site, sys
site.addsitedir({folder!r})
from tests.support.ranks import run_ranks
from tests.support import own_loop

def on_rank(rank):
    own_loop.start()
    model = own_loop.build(2)
    return [layer.layer_number for part in model for layer in part.module.decoder.layers], own_loop.train(
        model, own_loop.COUNTS
    )

open({found!r}, "wb").write(pickle.dumps(run_ranks(on_rank, 2)))
"""
"""A trainer that does not name this package: a site-packages of its own has what ``mpp activate`` writes."""


def test_the_environment_puts_a_schedule_into_a_trainer(found, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(startup_file.sysconfig, "get_path", lambda kind: str(tmp_path))
    startup_file.activate()
    file = tmp_path / "found.pickle"
    asked = {
        "MEGATRON_PP_SCHEDULE": "v-half",
        "MEGATRON_PP_RANKS": "2",
        "MEGATRON_PP_MICROBATCHES": "8",
        "PYTHONPATH": str(own_process.ROOT),
    }
    program = ACTIVATED.format(folder=str(tmp_path), found=str(file))
    command = [sys.executable, "-c", program]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=own_process.ROOT, env=os.environ | asked
    )
    assert run.returncode == 0, run.stderr[-4000:]
    ranks = pickle.loads(file.read_bytes())
    assert [layers for layers, _ in ranks] == [[3, 4, 5, 6], [1, 2, 7, 8]]
    assert_same([record for _, record in ranks], [rank["stock", False] for rank in found])
