"""The first training step of a loop that gives no order: can its microbatches be ordered, need they be?

A loop of one's own reads its data as it likes.  Its first step therefore runs in the order of the data and is
watched; before the second one all ranks of the job decide together.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_pp_ext.features.lengths.megatron.agreement import Sizes
from megatron_pp_ext.features.lengths.megatron.known_shapes import KnownShapes, size_of
from megatron_pp_ext.features.lengths.ordering import LengthsOf, Ordering, is_packed, lengths_of_batch
from megatron_pp_ext.integration.runners.message_groups import shapes_of
from megatron_pp_ext.integration.runners.model_stage import StepInputs
from megatron_pp_ext.integration.runners.step_parts import Step, StepPart
from megatron_pp_ext.runtime.channels import Shape
from megatron_pp_ext.runtime.first_rank import print_rank_0

_REPLAYS = "moe_enable_routing_replay", "enable_routing_replay"
"""The names in a config, Megatron's and verl's, for routing that is replayed in the order of its record."""


class _Seen(NamedTuple):
    """What a rank has seen of its first step: why no order can be, and whether lengths may differ.

    ``sizes`` are those of the microbatches that it has read, as far as they have any.
    """

    why: str = ""
    reads: bool = False
    may_differ: bool = False
    sizes: Sizes = ()


class FirstStep:
    """Watches the first training step of a runner, and has the later ones ordered where that can and need be.

    ``then`` makes what orders them; it gets for each chunk of this rank whether its iterator is read, and
    what the first step has shown of shapes.
    """

    def __init__(self, ordering: Ordering, then: Callable[[Sequence[bool], KnownShapes], StepPart]) -> None:
        self._lengths_of, self._then = ordering.lengths_of, then
        self._shapes = KnownShapes()
        self._announced: Mapping[int, set[Shape]] = {}
        self._seen: _Seen | None = None
        self._are_read: Sequence[bool] = ()
        self._later: StepPart | None = None

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Surround a step; evaluations are left alone."""
        inputs = step.inputs
        if inputs.forward_only:
            yield
        elif self._seen is None:
            given = inputs.iterators
            watched = [_Watched(one, self._lengths_of) if hasattr(one, "__next__") else None for one in given]
            inputs.iterators = [one or data for one, data in zip(watched, given, strict=True)]
            yield
            self._learn(inputs, given, watched)
        else:
            self._later = self._later or self._decide(self._seen, inputs)
            with self._later(step):
                yield

    def _learn(self, inputs: StepInputs, given: Sequence[Any], watched: Sequence["_Watched | None"]) -> None:
        self._are_read = [one is not None and one.read > 0 for one in watched]
        read = [one for one in watched if one is not None and one.read]
        why = _why_not(inputs.config)
        if len({id(one) for one, is_read in zip(given, self._are_read, strict=True) if is_read}) < len(read):
            why = why or "chunks of a rank read one data iterator"
        for one in watched:
            if one is not None:
                why = why or one.why_not(inputs.microbatches)
        may_differ = bool(inputs.config.variable_seq_lengths) or any(one.is_packed for one in read)
        sizes = [size for size in (read[0].sizes if read else ()) if size is not None]
        is_known = len(sizes) == inputs.microbatches
        self._seen = _Seen(why, bool(read), may_differ, tuple(sizes) if is_known else ())
        self._announced = inputs.announced or {}

    def _decide(self, seen: _Seen, inputs: StepInputs) -> StepPart:
        """Return what later steps do; collective over the job, so that replicas do the same."""
        all_seen: list[_Seen] = [seen] * dist.get_world_size()
        dist.all_gather_object(all_seen, seen)
        why = next((one.why for one in all_seen if one.why), "")
        if not why and not any(one.reads for one in all_seen):
            why = "no data is read by next(data_iterator)"
        if why:
            print_rank_0(f"megatron_pp_ext: microbatches stay in the order of the data: {why}")
        elif any(one.may_differ for one in all_seen):
            print_rank_0(
                "megatron_pp_ext: lengths of microbatches may differ: from this step on they run in the "
                "order by the rule of the schedule"
            )
            self._learn_shapes(all_seen, inputs)
            return self._then(self._are_read, self._shapes)
        return as_given

    def _learn_shapes(self, all_seen: Sequence[_Seen], inputs: StepInputs) -> None:
        """Compare what messages announced with what this pipeline's ranks have read."""
        if not self._announced:
            return
        sizes = [all_seen[rank].sizes for rank in dist.get_process_group_ranks(inputs.group)]
        if shapes := shapes_of(inputs, next(filter(None, sizes), ())):
            self._shapes.learn(self._announced, shapes)


@contextmanager
def as_given(step: Step) -> Iterator[None]:
    """Leave a step as it is."""
    yield


class _Watched:
    """A data iterator that counts what is read and looks at the lengths in it."""

    def __init__(self, data: Any, lengths_of: LengthsOf) -> None:
        self._data, self._lengths_of = data, lengths_of
        self._unknown = self._other_use = ""
        self.sizes: list[tuple[int, int] | None] = []
        self.read = 0
        self.is_packed = lengths_of is not lengths_of_batch
        """Whether microbatches of one shape may have other documents: a call's function may know of any."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._data)
        self.read += 1
        self.sizes.append(size_of(batch))
        self.is_packed = self.is_packed or is_packed(batch)
        if not self._unknown:
            try:
                self._lengths_of(batch)
            except ValueError as error:
                self._unknown = str(error)
        return batch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._data, name)
        self._other_use = name
        return found

    def why_not(self, microbatches: int) -> str:
        """Return why the data of a step cannot be read ahead and ordered; empty where it can be."""
        if self._other_use:
            return f"the loop uses {self._other_use} of its data iterator"
        if self.read not in (0, microbatches):
            return f"the loop reads its data {self.read} times for {microbatches} microbatches"
        return self._unknown


def _why_not(config: Any) -> str:
    """Return why a model with this config needs its microbatches in the order of the data, or nothing."""
    replays = any(getattr(config, name, False) for name in _REPLAYS)
    return "routing is replayed in the order of its record" if replays else ""
