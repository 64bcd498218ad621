"""The order of the data is the caller's: loops that can observe it train as under stock."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_pp_ext.compiler.make import make
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.features.units.microbatches import Microbatches
from megatron_pp_ext.features.units.orders import light_heavy_light
from megatron_pp_ext.features.units.rates import LengthCosts
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.simulate import simulate

from tests.support.ranks import RankError, run_ranks  # isort: skip  (the stand-ins come before Megatron)
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

import megatron_pp_ext
from megatron_pp_ext.features.units.megatron import steps
from megatron_pp_ext.megatron.requested import Pipeline
from tests.support import own_loop
from tests.support.observing_loops import LOOPS, trained

COUNTS, LENGTHS = (5, 4), (8, 5, 31, 17, 11, 3)
CHUNKS = {"zb-h1": 1, "v-half": 2}
VARIES = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}


def logged() -> list[str]:
    """Return what will have the lines about an order."""
    lines: list[str] = []
    steps.print_rank_0 = lines.append
    return lines


def on_rank(rank: int) -> dict[Any, Any]:
    own_loop.start()
    found: dict[Any, Any] = {}
    for name in LOOPS:
        found["stock", name] = trained(name, own_loop.build(1, **VARIES), COUNTS, LENGTHS)
        for schedule, chunks in CHUNKS.items():
            with megatron_pp_ext.installed(schedule, ranks=2, microbatches=5):
                lines = logged()
                found[schedule, name] = trained(name, own_loop.build(chunks, **VARIES), COUNTS, LENGTHS)
                found["lines", schedule, name] = lines
    for kind, order, lengths in (
        ("given", "given", LENGTHS),
        ("equal", None, (8,)),
        ("asked", "rule", LENGTHS),
    ):
        lines = logged()
        with megatron_pp_ext.installed("zb-h1", ranks=2, microbatches=5, order=order):
            trained("plain", own_loop.build(1, **VARIES), COUNTS, lengths)
        found["lines", kind] = lines
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[Any, Any]]:
    return run_ranks(on_rank, 2)


@pytest.mark.parametrize("schedule", CHUNKS)
@pytest.mark.parametrize("name", LOOPS)
def test_loops_without_an_order_train_as_under_stock(found: Any, name: str, schedule: str) -> None:
    ours, stock = ([rank[key, name] for rank in found] for key in (schedule, "stock"))
    own_loop.assert_same(ours, stock)


def test_one_line_says_what_an_order_would_bring_where_shapes_vary(found: Any) -> None:
    first, second = found
    words = (
        r"of \d to 31 tokens run in the order of the data; with order='rule' .* \d+% less time by simulation"
    )
    for schedule in CHUNKS:
        for name in LOOPS:
            (line,) = first["lines", schedule, name]
            assert re.search(words, line)
    assert [first["lines", kind] for kind in ("given", "equal", "asked")] == [[]] * 3
    assert not any(lines for key, lines in second.items() if key[0] == "lines")


def over_replicas(rank: int) -> Any:
    """Train two replicas with lengths of their own, whose losses divide by the tokens of both."""
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 2)
    model_parallel_cuda_manual_seed(1)
    replica = parallel_state.get_data_parallel_rank()
    about = "communicates in its loss", COUNTS, LENGTHS if replica == 0 else (3, 30, 9, 4, 21)

    def run() -> own_loop.Record:
        name, *sizes = about
        return trained(name, own_loop.build(1, **VARIES), *sizes, seed=7 + replica)

    stock = run()
    with megatron_pp_ext.installed("zb-h1", ranks=2, microbatches=5):
        return run(), stock


def test_losses_may_communicate_over_replicas() -> None:
    found = run_ranks(over_replicas, 4)
    own_loop.assert_same(*zip(*found[::2], strict=True))
    own_loop.assert_same(*zip(*found[1::2], strict=True))


REFUSED = {name: loop.refused for name, loop in LOOPS.items() if loop.refused}


def ordered(rank: int, name: str) -> None:
    own_loop.start()
    with megatron_pp_ext.installed("zb-h1", ranks=2, microbatches=5, order="rule"):
        trained(name, own_loop.build(1, **VARIES), COUNTS, LENGTHS)


@pytest.mark.parametrize("name", REFUSED)
def test_an_order_is_refused_where_a_loop_does_not_allow_it(name: str) -> None:
    with pytest.raises(RankError, match=REFUSED[name]):
        run_ranks(ordered, 2, name, timeout=120)


LENGTHS_OF_STEP = 500, 4000, 100, 900, 8000, 300


def step_with(*tokens: int, **inputs: Any) -> Any:
    """Return a step of four ranks that has run with microbatches of so many ``tokens``, of two ranks each."""
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 2), cp=SimpleNamespace(size=lambda: 1))
    config = SimpleNamespace(sequence_parallel=True, expert_model_parallel_size=1)
    announced = {number: {(each // 2, 1, 16)} for number, each in enumerate(tokens)}
    schedule = make(named("1f1b", 4, len(tokens))).schedule
    of_step = {"forward_only": False, "microbatches": len(tokens), "announced": announced, **inputs}
    return SimpleNamespace(
        schedule=schedule,
        placement=schedule.placement,
        inputs=SimpleNamespace(groups=groups, config=config, **of_step),
    )


def test_the_line_has_the_gain_of_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that nobody knows counts as one of 7 billion parameters."""
    lines = logged()
    monkeypatch.setattr(steps.dist, "get_rank", lambda: 0)
    unordered = steps.Unordered(Pipeline(named("1f1b", 4, len(LENGTHS_OF_STEP))))
    for of_step in (
        step_with(*LENGTHS_OF_STEP, forward_only=True),
        step_with(*LENGTHS_OF_STEP, announced=None),
        step_with(*[800] * 6),
    ):
        with unordered.step(of_step):
            pass
    assert lines == []
    of_step = step_with(*LENGTHS_OF_STEP)
    for _ in range(2):
        with unordered.step(of_step):
            pass
    costs = LengthCosts.with_attention(Costs.per_rank(4), 1)
    microbatches = Microbatches.of([length] for length in LENGTHS_OF_STEP)
    of_microbatches = costs.of(microbatches)
    order = light_heavy_light(costs.work(microbatches))
    as_it_comes, by_rule = (
        simulate(of_step.schedule, each).makespan
        for each in (of_microbatches, of_microbatches.ordered(order))
    )
    (line,) = lines
    assert by_rule < 0.95 * as_it_comes
    assert "microbatches of 100 to 8,000 tokens" in line
    assert (
        f"with --pipeline-order rule this step would have taken {1 - by_rule / as_it_comes:.0%} less time"
        in line
    )


@pytest.mark.parametrize(
    ("settings", "schedule", "limit", "says"),
    [
        ({}, "1f1b", None, True),
        ({"moe_enable_routing_replay": True}, "1f1b", None, False),
        ({"enable_routing_replay": True}, "1f1b", None, False),
        ({"expert_model_parallel_size": 2}, "1f1b", None, True),
        ({}, "flex", 0.9, True),
        ({"expert_model_parallel_size": 2}, "flex", 0.9, False),
    ],
)
def test_nothing_is_said_where_an_order_would_be_refused(
    monkeypatch: pytest.MonkeyPatch, settings: Any, schedule: str, limit: Any, says: bool
) -> None:
    lines = logged()
    monkeypatch.setattr(steps.dist, "get_rank", lambda: 0)
    of_step = step_with(*LENGTHS_OF_STEP)
    vars(of_step.inputs.config).update(settings)
    request = replace(named(schedule, 4, 6, limit=limit), placements=(of_step.placement,))
    with steps.Unordered(Pipeline(request)).step(of_step):
        pass
    assert bool(lines) is says
