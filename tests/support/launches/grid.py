"""The pipelines that all tests of launches run, each as the schedules of its steps.

A step that is not the last one leaves messages in flight.
"""

from collections.abc import Iterator

from megatron_pp_ext.features.vocabulary.share import share, share_evaluation
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.families import pipedream
from megatron_pp_ext.schedule.families.pipedream import Replicas
from megatron_pp_ext.schedule.placement import linear, loop, v, wave
from tests.support.offloaded import half, with_offloaded

Steps = tuple[Schedule, ...]

UPDATES = 3
"""The updates of a pipeline without a flush: it fills, runs and drains."""


def families(ranks: int, microbatches: int) -> Iterator[Steps]:
    """Yield every schedule of the catalogue."""
    for name in catalog.NAMES:
        yield (catalog.build(name, ranks, microbatches),)


def pairs(ranks: int, microbatches: int) -> Iterator[Steps]:
    """Yield every schedule of the catalogue that has pairs, with them."""
    for name, entry in catalog.ENTRIES.items():
        if entry.make_paired:
            yield (catalog.build(name, ranks, microbatches, paired=True),)


def evaluations(ranks: int, microbatches: int) -> Iterator[Steps]:
    """Yield the forwards alone, with every shape of placement."""
    for placement in (linear(ranks), loop(ranks, 2), loop(ranks, 4), v(ranks), wave(ranks, 4)):
        yield (catalog.forward_only(placement, microbatches),)


def shared_vocabularies(ranks: int, microbatches: int) -> Iterator[Steps]:
    """Yield every schedule of the catalogue with a vocabulary that all ranks share, and evaluations."""
    for name in catalog.NAMES:
        yield (share(lambda count, name=name: catalog.build(name, ranks, count), microbatches),)  # type: ignore[misc]
    for (evaluation,) in evaluations(ranks, microbatches):
        yield (share_evaluation(evaluation),)


def without_flush(ranks: int, interval: int) -> Steps:
    """Return PipeDream with an update after every ``interval`` microbatches."""
    stages = Replicas.straight(ranks)
    orders = (pipedream.step(stages, interval, update, UPDATES) for update in range(UPDATES))
    return tuple(Schedule("pipedream", linear(ranks), interval, of_update) for of_update in orders)


def copies(ranks: int, microbatches: int) -> Iterator[Steps]:
    """Yield families and pairs with half of the activations on the host, and with all."""
    for (schedule,) in (*families(ranks, microbatches), *pairs(ranks, microbatches)):
        yield (with_offloaded(schedule, half),)
        yield (with_offloaded(schedule),)


def everything(ranks: int, microbatches: int) -> Iterator[Steps]:
    """Yield all of these."""
    yield from families(ranks, microbatches)
    yield from pairs(ranks, microbatches)
    yield from evaluations(ranks, microbatches)
    yield without_flush(ranks, microbatches)
