"""A vocabulary that all ranks share: the gradients and losses of one process, under every family."""

import functools
import sys

import pytest
import torch
import torch.distributed as dist

from megatron_pp_ext.features.vocabulary.runtime.exchanges import (
    DummyExchanges,
    Exchanges,
    Rows,
    SharedEmbedding,
)
from megatron_pp_ext.features.vocabulary.runtime.output import SharedOutput, SharedVocabulary
from megatron_pp_ext.features.vocabulary.share import share, share_evaluation, without_weight_gradients
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.plan import plan_rank
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.runtime.split import STORE
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kind, Schedule
from megatron_pp_ext.schedule.messages import Exchange, Exchanged
from tests.support import plain_stages
from tests.support.plain_stages import ROWS, WIDTH
from tests.support.ranks import run_ranks
from tests.support.tiers import first

VOCABULARY = 11


def weight() -> torch.Tensor:
    return torch.randn(
        VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(77), dtype=torch.double, requires_grad=True
    )


def embedding() -> torch.Tensor:
    return torch.randn(
        VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(78), dtype=torch.double, requires_grad=True
    )


def tokens(microbatch: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (ROWS,), generator=torch.Generator().manual_seed(100 + microbatch))


def labels(microbatch: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (ROWS,), generator=torch.Generator().manual_seed(microbatch))


def loss(losses: torch.Tensor, microbatch: int) -> torch.Tensor:
    """Tokens count differently, and one not at all."""
    return (losses * torch.arange(ROWS, dtype=losses.dtype) * (microbatch + 1)).sum() / 7


def first_rows(ranks: int) -> list[int]:
    """The rank's first row, and the end of the last one's: parts that differ by one row."""
    return [rank * VOCABULARY // ranks for rank in range(ranks + 1)]


class Head:
    """The last stage's rank."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def labels(self, microbatch: int) -> torch.Tensor:
        return labels(microbatch)

    def gradient(self, microbatch: int, losses: torch.Tensor) -> torch.Tensor:
        losses = losses.detach().requires_grad_()
        value = loss(losses, microbatch)
        value.backward()
        self.losses[microbatch] = value.item()
        assert losses.grad is not None
        return losses.grad


class Counted(Exchanges):
    """Counts what is broadcast."""

    broadcasts = 0

    def broadcast(self, tensor: torch.Tensor, home: int) -> dist.Work:
        self.broadcasts += 1
        return super().broadcast(tensor, home)


def run_schedule(rank: int, schedule: Schedule, scale: float, frozen: tuple[str, ...] = ()) -> dict:
    """Run one step and tell the gradients and the losses of this rank."""
    placement = schedule.placement
    stages = {
        number: plain_stages.make_stage(number, placement.stages + 1) for number in placement.stages_of(rank)
    }
    begin, end = first_rows(schedule.ranks)[rank : rank + 2]
    part = (weight().detach() * scale)[begin:end]
    gradient = torch.zeros_like(part)
    looked_up = embedding().detach()[begin:end]
    of_embedding = torch.zeros_like(looked_up)
    first, home = placement.rank_of(0), placement.rank_of(placement.stages - 1)
    head = Head() if rank == home else None
    exchanges = Counted(dist.new_group())
    vocabulary = SharedVocabulary(
        SharedEmbedding(
            Rows(begin, end - begin, lambda: looked_up, of_embedding.add_, "embedding" not in frozen),
            torch.Size((ROWS,)),
            torch.device("cpu"),
            exchanges,
            first,
            tokens if rank == first else None,
        ),
        SharedOutput(
            Rows(begin, end - begin, lambda: part, gradient.add_, "output" not in frozen),
            torch.Size((ROWS, WIDTH)),
            exchanges,
            home,
            head,
            is_evaluation=all(a.kind in (Kind.F, Kind.S) for a in schedule),
        ),
    )
    channels = plain_stages.make_channels(schedule.ranks)
    kept_for_t = []
    score = vocabulary.output.logits

    def logits(microbatch: int) -> None:
        score(microbatch)
        kept = vocabulary.output._kept[microbatch]
        kept_for_t.append(kept.exponentials.numel() + kept.hidden.numel())

    vocabulary.output.logits = logits  # type: ignore[method-assign]
    execute(plan_rank(schedule, rank), Rank(stages, channels, parts=[vocabulary]))
    return {
        "broadcasts": exchanges.broadcasts,
        "kept for T": max(kept_for_t),
        "gradients": {n: [p.grad for p in s.module.parameters()] for n, s in stages.items()},
        "vocabulary": gradient,
        "embedding": of_embedding,
        "losses": head.losses if head else {},
        "left": len(STORE) + len(vocabulary.output._kept) + len(vocabulary.embedding._kept),
    }


def in_one_process(stages, microbatches, scale):
    """Return the gradients of every stage, of the output weight and of the embedding, and the losses."""
    modules = [plain_stages.make_module(stage) for stage in range(stages)]
    output = (weight().detach() * scale).requires_grad_()
    lookup = embedding()
    losses = {}
    for microbatch in range(microbatches):
        hidden = torch.nn.Sequential(*modules)(lookup[tokens(microbatch)])
        each = torch.nn.functional.cross_entropy(hidden @ output.t(), labels(microbatch), reduction="none")
        value = loss(each, microbatch)
        value.backward()
        losses[microbatch] = value.item()
    of_stages = {stage: [p.grad for p in module.parameters()] for stage, module in enumerate(modules)}
    assert output.grad is not None and lookup.grad is not None
    return of_stages, output.grad, lookup.grad, losses


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, scale: float) -> None:
    """Within some hundred roundings of the numbers that are summed, which have the size of the weight."""
    size = max(1.0, scale, theirs.abs().max().item())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13 * size)


def assert_equals_one_process(schedule, results, scale=1.0, frozen=()):
    stages, output, lookup, losses = in_one_process(schedule.placement.stages, schedule.microbatches, scale)
    assert {n: value for result in results for n, value in result["losses"].items()} == pytest.approx(losses)
    for part, told, expected in (("output", "vocabulary", output), ("embedding", "embedding", lookup)):
        ours = torch.cat([result[told] for result in results])
        assert_close(ours, torch.zeros_like(ours) if part in frozen else expected, scale)
    for result in results:
        assert result["left"] == 0
        for stage, gradients in result["gradients"].items():
            for mine, expected in zip(gradients, stages[stage], strict=True):
                assert_close(mine, expected, scale)


def shared(name: str, ranks: int, microbatches: int) -> Schedule:
    return share(lambda count: catalog.build(name, ranks, count), microbatches)


def results(schedule: Schedule, scale: float = 1.0, frozen: tuple[str, ...] = ()) -> tuple[dict, ...]:
    run = functools.partial(run_schedule, scale=scale, frozen=frozen)
    return plain_stages.on_ranks(run, [schedule])[0]


@functools.cache
def results_of(ranks: int, microbatches: int) -> dict[str, tuple[Schedule, tuple[dict, ...]]]:
    """Return every family's schedule, and what the ranks tell under it."""
    schedules = [shared(name, ranks, microbatches) for name in catalog.NAMES]
    told = plain_stages.on_ranks(functools.partial(run_schedule, scale=1.0), schedules)
    return dict(zip(catalog.NAMES, zip(schedules, told, strict=True), strict=True))


@pytest.mark.parametrize("name", catalog.NAMES)
@pytest.mark.parametrize(("ranks", "microbatches"), first(2, [(2, 5), (3, 3), (2, 1), (4, 9)]))
def test_gradients_are_those_of_one_process(name: str, ranks: int, microbatches: int) -> None:
    assert_equals_one_process(*results_of(ranks, microbatches)[name])


@pytest.mark.parametrize(
    ("name", "frozen"),
    [("1f1b", ("embedding", "output")), ("v-half", ("embedding",)), ("v-half", ("output",))],
)
def test_frozen_weights_take_no_part_in_a_backward(name: str, frozen: tuple[str, ...]) -> None:
    """All other gradients are what they were; nothing is exchanged for, or kept until, what nobody needs."""
    whole = shared(name, 3, 4)
    schedule = without_weight_gradients(whole) if "output" in frozen else whole
    told = results(schedule, frozen=frozen)
    assert_equals_one_process(schedule, told, frozen=frozen)
    for result in told:
        # Tokens, hidden state and labels; each end needs one more that trains.
        assert result["broadcasts"] == 4 * (5 - len(frozen))
        assert bool(result["kept for T"]) is ("output" not in frozen)


def test_logits_of_any_size() -> None:
    """The largest logits are hundreds, whose exponentials would overflow, and the model is sure of tokens."""
    schedule = shared("v-half", 3, 4)
    assert_equals_one_process(schedule, results(schedule, scale=500.0), scale=500.0)


def test_logits_that_are_all_far_below_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the exponential of a logit that another rank has, 0 here, would overflow."""
    monkeypatch.setattr(
        sys.modules[__name__], "weight", lambda: -torch.ones(VOCABULARY, WIDTH, dtype=torch.double)
    )
    schedule = shared("v-half", 3, 4)
    assert_equals_one_process(schedule, results(schedule, scale=5000.0), scale=5000.0)


def test_an_evaluation_has_the_losses_alone() -> None:
    placements = [catalog.entry(name).placement(3) for name in ("1f1b", "interleaved", "v-half")]
    schedules = [share_evaluation(catalog.forward_only(placement, 5)) for placement in placements]
    by_schedule = plain_stages.on_ranks(functools.partial(run_schedule, scale=1.0), schedules)
    for schedule, told in zip(schedules, by_schedule, strict=True):
        _, _, _, losses = in_one_process(schedule.placement.stages, 5, 1.0)
        assert {n: value for result in told for n, value in result["losses"].items()} == pytest.approx(losses)
        assert all(result["left"] == 0 and not result["vocabulary"].any() for result in told)


def _look_up(rank: int) -> list[int]:
    """Return how many microbatches' embedded tokens this rank keeps behind each lookup."""
    dist.init_process_group("gloo")
    weight, gradient = torch.ones(2, 3), torch.zeros(2, 3)
    tokens = (lambda microbatch: torch.arange(4)) if rank == 0 else None
    shape = torch.Size((4,))
    rows = Rows(2 * rank, 2, lambda: weight, gradient.add_)
    embedding = SharedEmbedding(rows, shape, torch.device("cpu"), Exchanges(dist.new_group()), 0, tokens)
    kept = []
    for microbatch in range(4):
        embedding.launch(Exchange(Exchanged.TOKENS, microbatch))
        embedding.launch(Exchange(Exchanged.EMBEDDED, microbatch))
        kept.append(sum(one.embedded is not None for one in embedding._kept.values()))
    if rank == 0:
        assert all(torch.equal(embedding.embedded(microbatch), torch.ones(4, 3)) for microbatch in range(4))
    embedding.close()
    return kept


def test_what_was_looked_up_is_given_back() -> None:
    """By the first stage when it takes it, by the others once it had time to leave."""
    first, second = run_ranks(_look_up, 2)
    assert first == [1, 2, 3, 4]
    assert second == [1, 1, 1, 1]


SHAPE = (3, 2, 4)
NUMBERS = torch.arange(24.0).reshape(SHAPE)


def dummy_exchanges(rank: int) -> None:
    dist.init_process_group("gloo")
    world = dist.group.WORLD
    assert world is not None
    exchanges = DummyExchanges(world, world, rows=50)
    tokens, numbers = torch.full((400,), -1), torch.full(SHAPE, torch.nan)
    for home in (0, 1):
        exchanges.broadcast(tokens, home).wait()
        exchanges.broadcast(numbers, home).wait()
        # What rank 0 broadcasts itself is as it was.
        assert bool((tokens == -1).all()) is bool(numbers.isnan().all()) is (home == 0)
    assert 0 <= tokens.min() < 5 < 45 < tokens.max() < 50
    assert numbers.any() and numbers.isfinite().all()
    whole, gathering = exchanges.gather(NUMBERS)
    gathering.wait()
    assert torch.equal(whole, NUMBERS[None])
    mine = NUMBERS.clone()
    exchanges.reduce(mine, 1).wait()
    assert torch.equal(mine, NUMBERS)


def test_dummy_exchanges_are_numbers_to_compute_with() -> None:
    run_ranks(dummy_exchanges, 1)
