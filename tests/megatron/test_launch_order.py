"""Real jobs, and all that their ranks launch, in the model of launch queues: no circle, and one order."""

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise, zip_longest
from typing import NamedTuple

import pytest

from tests.support.launches.entries import Collective, Launches, Transfer, Wait
from tests.support.launches.hardware import Setting
from tests.support.launches.queues import circle
from tests.support.launches.synchronizations import before_every_launch
from tests.support.launches.whole_jobs import BETWEEN, record_job
from tests.support.tiers import first

BASE = "--pipeline-model-parallel-size 2 --num-layers 4 --train-iters 2"
GATHER, SCATTER, EXCHANGE = "_?all_?gather", "_?reduce_scatter", "all_?to_?all"
FORWARD, BACKWARD, WEIGHT = r"\dF\d", r"\d[IB]\d", r"\d[WB]\d"
OVERLAP = (
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --no-align-grad-reduce "
    "--no-align-param-gather --ddp-bucket-size 1000"
)
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
EVALUATED = "--eval-interval 1 --eval-iters 1"


class Feature(NamedTuple):
    """Flags, and patterns of what they have a rank launch, each behind its action."""

    flags: str
    launches: tuple[str, ...]
    ranks: int = 4


FEATURES = {
    "tensor": Feature(f"{TENSOR} --global-batch-size 4", (f"{FORWARD}: {SCATTER}", rf"{WEIGHT}: {GATHER}")),
    "data": Feature(OVERLAP, (rf"\dF0: {GATHER}", f"{WEIGHT}: {SCATTER}", f"{BETWEEN}: {GATHER}")),
    "experts": Feature(
        "--expert-model-parallel-size 2 --num-experts 4 --moe-token-dispatcher-type alltoall "
        "--moe-router-topk 2 --disable-bias-linear",
        (f"{FORWARD}: {EXCHANGE}", f"{BACKWARD}: {EXCHANGE}"),
    ),
    "pairs": Feature(
        "--expert-model-parallel-size 2 --num-experts 4 --moe-token-dispatcher-type alltoall "
        "--moe-router-topk 2 --disable-bias-linear --bf16 --overlap-moe-expert-parallel-comm",
        (rf"\dF\d\+\dB\d: {EXCHANGE}", f"{FORWARD}: {EXCHANGE}", f"{BACKWARD}: {EXCHANGE}"),
    ),
    "context": Feature(
        "--context-parallel-size 2 --global-batch-size 4", (f"{FORWARD}: {GATHER}", f"{BACKWARD}: {SCATTER}")
    ),
    "shared slices": Feature(
        "--context-parallel-size 2 --global-batch-size 2 --pipeline-slice-tokens 16",
        (f"{FORWARD}: {EXCHANGE}", rf"\d[IB]\d: {EXCHANGE}"),
    ),
    "tied": Feature(
        f"{EVALUATED} --pipeline-model-parallel-size 4 --num-layers 8 --global-batch-size 4",
        (f"{BETWEEN}: allreduce 64x32",),
    ),
    "all": Feature(
        f"{TENSOR} {OVERLAP} {EVALUATED} --global-batch-size 4",
        (f"{FORWARD}: {SCATTER}", rf"\dF0: {GATHER}", f"{WEIGHT}: {SCATTER}"),
        ranks=8,
    ),
    "vocabulary": Feature(
        f"{TENSOR} {OVERLAP} {EVALUATED} --global-batch-size 4 --pipeline-vocabulary shared",
        (rf"\dS\d: {GATHER}", rf"\d[IB]\d: {SCATTER}", r"\d[FIWTS]\d: reduce", r"\d[FIWTS]\d: broadcast"),
        ranks=8,
    ),
    "vocabulary of a line": Feature(
        f"{EVALUATED} --pipeline-model-parallel-size 4 --num-layers 8 --global-batch-size 6 "
        "--pipeline-vocabulary shared",
        (r"\d[FIWTS]\d: reduce", r"\d[FIWTS]\d: broadcast"),
    ),
    "in flight": Feature(
        f"{EVALUATED} --untie-embeddings-and-output-weights --global-batch-size 2 --train-iters 3",
        (f"{BETWEEN}: allreduce",),
    ),
    "replicas": Feature(
        f"{EVALUATED} --untie-embeddings-and-output-weights --global-batch-size 2 --train-iters 3 "
        "--pipeline-replicas 2-1 --pipeline-update-interval 2",
        (rf"{BETWEEN}: allreduce \d+$",),
        ranks=3,
    ),
}

JOBS = [
    ("tensor", "v-half"),
    ("data", "zb-h1"),
    ("pairs", "dualpipe-v"),
    ("context", "1f1b"),
    ("tied", "v-half"),
    ("vocabulary of a line", "zb-h1"),
    ("shared slices", "v-half"),
    ("in flight", "pipedream"),
    ("replicas", "pipedream"),
    ("tensor", "zb-h1"),
    ("experts", "zb-h1"),
    ("pairs", "1f1b"),
    ("context", "v-zb"),
    ("all", "v-half"),
    ("vocabulary", "v-half"),
]


@functools.cache
def recorded(feature: str, schedule: str) -> tuple[Launches, ...]:
    flags, _, ranks = FEATURES[feature]
    return record_job(ranks, f"{BASE} {flags} --pipeline-schedule {schedule}".split())


def disorder(launches: Sequence[Launches]) -> str:
    """The first collective that two ranks launch out of order, in words; empty if there is none.

    Any two ranks launch those that both take part in, of whatever groups, in one order and in one action.
    Exchanges about a shared vocabulary have one order too, but stand behind other actions on each rank.
    """
    for pair in combinations(range(len(launches)), 2):
        shared = [
            [
                f"{entry.group}: {_without_action(entry)}"
                for entry in launches[rank]
                if isinstance(entry, Collective) and {*pair} <= {*entry.ranks}
            ]
            for rank in pair
        ]
        for number, (one, other) in enumerate(zip_longest(*shared)):
            if one != other:
                return f"launch {number} of those that ranks {pair} share: {one} and {other}"
    return ""


def _without_action(entry: Collective) -> str:
    """The name of a collective, without its action where ranks launch it in different ones."""
    return entry.name.partition(": ")[2] if "VOCABULARY" in entry.group else entry.name


@pytest.mark.parametrize(("feature", "schedule"), first(7, JOBS))
def test_a_job_cannot_hang(feature: str, schedule: str) -> None:
    launches = recorded(feature, schedule)
    names = {entry.name for entry in launches[0] if isinstance(entry, Collective)}
    for pattern in FEATURES[feature].launches:
        assert any(re.match(pattern, name) for name in names), pattern
    out_of_order = disorder(launches)
    assert not out_of_order
    # Each launch waits for all before it, which no queues, streams or fewer synchronizations can surpass.
    assert not circle(tuple(map(before_every_launch, launches)), Setting())


def moved(launches: Launches, taken: Sequence[int], to: int) -> Launches:
    """``launches`` of one rank, those at ``taken`` in front of the one at ``to``."""
    order = [*range(to), *taken, *(at for at in range(to, len(launches)) if at not in taken)]
    now_at = {before: after for after, before in enumerate(order)}
    entries = [launches[before] for before in order]
    return tuple(
        replace(entry, on=now_at[entry.on]) if isinstance(entry, Wait) else entry for entry in entries
    )


def collectives(launches: Launches, group: str) -> list[int]:
    """Where one rank launches those of ``group``."""
    return [
        at
        for at, entry in enumerate(launches)
        if isinstance(entry, Collective) and entry.group.startswith(group)
    ]


def test_weight_gradients_of_shared_slices_exchange_nothing() -> None:
    for launches in recorded("shared slices", "v-half"):
        for entry in launches:
            assert not re.match(rf"\dW\d: {EXCHANGE}", entry.name if isinstance(entry, Collective) else "")


def test_two_collectives_that_change_places_on_one_rank_are_found() -> None:
    first, *others = recorded("tensor", "1f1b")
    places = collectives(first, "TENSOR_MODEL_PARALLEL_GROUP")
    earlier, later = next((one, two) for one, two in pairwise(places) if first[one].name != first[two].name)
    assert isinstance(first[later + 1], Wait)
    changed = moved(first, (later, later + 1), earlier), *others
    assert first[earlier].name in disorder(changed) and first[later].name in disorder(changed)


def test_messages_wait_through_an_update() -> None:
    """Without a flush the last rank meets all others, and updates, behind a receive for later."""
    last = recorded("in flight", "pipedream")[-1]
    taken = {entry.on: at for at, entry in enumerate(last) if isinstance(entry, Wait)}
    meetings = collectives(last, "default_pg")
    open_receives = [
        at
        for at, entry in enumerate(last)
        if isinstance(entry, Transfer) and any(at < meeting < taken[at] for meeting in meetings)
    ]
    assert any(not last[at].is_send for at in open_receives)
