"""The costs of actions: seconds of work and of messages, activations and messages kept, by stage and unit.

Times and memory may be in any units that are the same throughout; a Timeline has the same units. The papers'
unit cost (every F, I and W takes 1, a message takes 0) is ``Costs.unit``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from megatron_pp_ext.json_input import STRICT
from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.placement import Placement

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


_IN_FILES = {"head": "vocabulary", "splits_head": "shares_vocabulary"}


def in_files(name: str) -> str:
    """Return the name that the field ``name`` of a dataclass has in files."""
    return _IN_FILES.get(name, name)


def as_written(value: "DataclassInstance") -> dict[str, Any]:
    """Return the fields of ``value``, nested ones too, by their names in files."""
    return asdict(value, dict_factory=lambda fields: {in_files(name): field for name, field in fields})


MOST = 1e100
"""The longest time, and the largest amount of memory: with much larger ones sums and pictures overflow."""

_TIMES = ("forward", "input_gradient", "weight_gradient")


@dataclass(frozen=True, slots=True)
class StageCosts:
    """The costs of one stage for one microbatch: the seconds of each action and the activations it keeps.

    A whole backward takes ``input_gradient + weight_gradient - hidden``: its products of weight gradients
    hide tensor-parallel messages, and nothing is gathered again.  A W may lend products of ``lent`` seconds
    to an I (``timing.lenders``), which hide up to ``hidden_beside`` of that I's messages.

    A forward keeps ``activation`` (bytes, or any unit) from its start.  The end of an I gives back
    ``released_by_input_gradient`` of it; below 0, the I keeps so much more from its start.  The end of a W or
    of a B gives back all.  An I also has ``workspace`` while it runs, and a B ``workspace_in_whole``.
    ``copy`` is the time in which activations are copied to the host, and of the copy back.

    ``parameters`` and ``expert_parameters`` are the weights that a rank has of the stage, the latter those of
    which expert-parallel ranks each have their own; schedules do not depend on them, and 0 stands for a stage
    whose weights nobody counted.  Raises ValueError for a time that is not above zero, for more ``hidden`` or
    ``lent`` than there is, and for an activation that is negative
    or smaller than what an I gives back.
    """

    __pydantic_config__: ClassVar = STRICT

    forward: float
    input_gradient: float
    weight_gradient: float
    activation: float = 1.0
    released_by_input_gradient: float = 0.0
    parameters: float = 0.0
    expert_parameters: float = 0.0
    copy: float = 0.0
    hidden: float = 0.0
    workspace: float = 0.0
    workspace_in_whole: float = 0.0
    lent: float = 0.0
    hidden_beside: float = 0.0

    def __post_init__(self) -> None:
        # A search makes many of these, and asking for the fields takes as long as all else.
        for name in self.__slots__:
            if name != "released_by_input_gradient" or not -MOST <= self.released_by_input_gradient < 0:
                _require_finite(self, name, positive=name in _TIMES)
        if self.released_by_input_gradient > self.activation:
            raise ValueError(
                f"StageCosts.released_by_input_gradient is {self.released_by_input_gradient}, more than the "
                f"activation of {self.activation} it is part of: lower it or raise activation"
            )
        if self.hidden and (self.hidden > self.weight_gradient or self.hidden >= self.input_gradient):
            raise ValueError(
                f"StageCosts.hidden is {self.hidden}, but a W of {self.weight_gradient} hides no more than "
                f"it takes, and of an I of {self.input_gradient} less than all: lower it"
            )
        if self.hidden_beside and self.hidden_beside >= self.input_gradient:
            raise ValueError(
                f"StageCosts.hidden_beside is {self.hidden_beside}, but of an I of {self.input_gradient} "
                "less than all is hidden: lower it"
            )
        if self.lent > self.weight_gradient:
            raise ValueError(
                f"StageCosts.lent is {self.lent}, but a W of {self.weight_gradient} lends no more than it "
                "takes: lower it"
            )

    def seconds(self, kind: Kind) -> float:
        """Return how long an action of this kind keeps the rank busy."""
        match kind:
            case Kind.F:
                return self.forward
            case Kind.I:
                return self.input_gradient
            case Kind.W:
                return self.weight_gradient
            case Kind.B:
                return self.input_gradient + self.weight_gradient - self.hidden
        raise ValueError(f"{kind} is no work of a stage: ask Costs.seconds")

    def growth(self, kind: Kind) -> float:
        """Return the memory that an action of this kind takes at its start; its end frees the rest."""
        match kind:
            case Kind.F:
                return self.activation
            case Kind.I:
                return self.workspace + max(0.0, -self.released_by_input_gradient)
            case Kind.W:
                return 0.0
            case Kind.B:
                return self.workspace_in_whole
        raise ValueError(f"{kind} is no work of a stage: ask Costs.growth")

    @property
    def charged_to_forward(self) -> Self:
        """The costs where a forward keeps all that its I or B takes, so that these only give back."""
        growth = max(self.growth(Kind.I), self.growth(Kind.B))
        return replace(
            self,
            activation=self.activation + growth,
            released_by_input_gradient=self.released_by_input_gradient + growth,
            workspace=0.0,
            workspace_in_whole=0.0,
        )

    def kept(self, kind: Kind) -> float:
        """Return by how much more is kept after an action of this kind than before; below 0, less."""
        match kind:
            case Kind.F:
                return self.activation
            case Kind.I:
                return -self.released_by_input_gradient
            case Kind.W:
                return self.released_by_input_gradient - self.activation
            case Kind.B:
                return -self.activation
        raise ValueError(f"{kind} is no work of a stage: ask Costs.kept")


@dataclass(frozen=True, slots=True)
class HeadCosts:
    """The costs of one rank's part of a head that is split over the ranks, for one microbatch.

    ``scores`` are the seconds of an S, ``weight_gradient`` of a T.  From the start of an S to the
    end of its T the rank keeps ``activation``.  ``hidden`` is the time from the end of the last stage's
    forward until every rank has its output, and ``sums`` the time from the end of the last S until the last
    stage has what it makes the loss and its gradient from.  Raises ValueError for a value that is negative
    or not finite, and for work that takes no time.
    """

    __pydantic_config__: ClassVar = STRICT

    scores: float
    weight_gradient: float
    activation: float = 0.0
    hidden: float = 0.0
    sums: float = 0.0

    def __post_init__(self) -> None:
        for cost in fields(self):
            _require_finite(self, cost.name, positive=cost.name in ("scores", "weight_gradient"))

    def exchanged_over(self, hop: float) -> Self:
        """Return the costs with messages of ``hop`` seconds: one of a hidden state, two after an S."""
        return replace(self, hidden=hop, sums=2 * hop)


@dataclass(frozen=True, slots=True)
class SequenceMemory:
    """The memory of a stage's attention for one microbatch whose sequences run in slices, beyond its costs.

    All slices together keep ``stored``, the keys and values of all tokens, from the F of the first one to its
    I, and ``owed``, the sums of gradients of these, from the I of the last slice to that of the first.  In
    return slices do not keep ``replaced``, a part of ``StageCosts.activation``.  Each keeps ``expanded``, or
    the part of it that belongs to the tokens up to its end, and ``masks`` for each product of one of its
    tokens and one up to its end.  Raises ValueError for a negative amount.
    """

    __pydantic_config__: ClassVar = STRICT

    stored: float = 0.0
    owed: float = 0.0
    replaced: float = 0.0
    expanded: float = 0.0
    masks: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            _require_finite(self, name, positive=False)

    def of_token(self, tokens: float) -> Self:
        """Return the amounts for one of so many ``tokens``, and those of masks."""
        return replace(self.times(1 / tokens), masks=self.masks)

    def times(self, factor: float) -> Self:
        """Return ``factor`` times each amount."""
        return type(self)(*(factor * getattr(self, name) for name in self.__slots__))


class SharedMemory(NamedTuple):
    """Memory of a stage that one unit takes or gives back for all slices of its sequence.

    Its F takes ``by_forward`` at its start, its I ``by_input_gradient``, whose end gives back ``returned``.
    """

    by_forward: float = 0.0
    by_input_gradient: float = 0.0
    returned: float = 0.0


_NONE = SharedMemory()


def part_of_pair(hidden: float, unpaired: float) -> float:
    """Return ``Costs.pair`` where actions take ``unpaired`` seconds, of which pairs hide ``hidden``."""
    return max(0.5, 1 - hidden / unpaired)


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of every stage of a pipeline.

    ``stages[s]`` are stage s's in model order; ``hop`` is the seconds between the end of
    an action and the arrival of its output on another rank (0 between stages of one rank).  ``message``
    is the size of a message's buffer, in the unit of ``StageCosts.activation``.  ``head`` are the costs of
    the part that each rank has of a split head (``Placement.splits_head``), which ``stages`` then leave out.

    ``pair`` is what a pair takes (``Schedule.paired``) as a part of the sum of its actions: 1 where neither
    hides anything of the other, and 1/2 where one of two equal actions is free.

    ``sizes`` are those at which the costs were measured, by the names of Megatron's arguments; none where
    nothing states it.  ``sequence`` is the memory that slices of a microbatch share, by stage; empty where it
    is not known.  ValueError where it is of another number of stages.
    """

    __pydantic_config__: ClassVar = {**STRICT, "alias_generator": in_files}

    stages: tuple[StageCosts, ...]
    hop: float = 0.0
    message: float = 0.0
    head: HeadCosts | None = None
    pair: float = 1.0
    sizes: Mapping[str, int] = field(default_factory=dict, compare=False)
    sequence: tuple[SequenceMemory, ...] = ()

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("Costs.stages is empty: give one StageCosts for each stage of the pipeline")
        if len(self.sequence) not in (0, len(self.stages)):
            raise ValueError(
                f"Costs.sequence has {len(self.sequence)} stages, but there are {len(self.stages)}: give one "
                "SequenceMemory a stage, or none"
            )
        _require_finite(self, "hop", positive=False)
        _require_finite(self, "message", positive=False)
        if not 0.5 <= self.pair <= 1:
            raise ValueError(
                f"Costs.pair is {self.pair}, but a pair takes half to all of the sum of its actions: give "
                "0.5 to 1"
            )

    @property
    def has_parameters(self) -> bool:
        """Whether the weights of every stage were counted."""
        return all(stage.parameters or stage.expert_parameters for stage in self.stages)

    @property
    def are_alike(self) -> bool:
        """Whether an action takes equally long for every microbatch; ``UnitCosts`` has others."""
        return True

    def seconds(self, action: Action) -> float:
        """Return how long ``action`` keeps its rank busy; ValueError for S and T without their costs."""
        if action.kind is Kind.S:
            return self._head(action).scores
        if action.kind is Kind.T:
            return self._head(action).weight_gradient
        return self.stages[action.stage].seconds(action.kind)

    def of_pair(self, forward: float, backward: float) -> float:
        """Return how long a pair takes whose actions take so many seconds alone; never less than either."""
        return max(self.pair * (forward + backward), forward, backward)

    def overlapped_together(self, stage: StageCosts) -> float:
        """Return the seconds that a forward and a backward of ``stage`` save where they run together."""
        return (1 - self.pair) * (stage.forward + stage.seconds(Kind.B))

    @property
    def of_all_stages(self) -> tuple[float, ...]:
        """The costs that are not per stage: ``hop``, ``message`` and, where it saves anything, ``pair``."""
        return (self.hop, self.message, *([self.pair] if self.pair < 1 else []))

    def hiding(self, hidden: float, unpaired: float) -> Self:
        """Return the costs where actions that take ``unpaired`` seconds hide ``hidden`` of them together."""
        return replace(self, pair=part_of_pair(hidden, unpaired))

    @property
    def at_their_shortest(self) -> Self:
        """The costs with every action as short as it is where it runs in a pair: its part of the pair's time.

        A rank is busy for no less than the sum of these, and no action ends sooner after its start.
        """
        stages = tuple(
            replace(
                stage,
                forward=self.pair * stage.forward,
                input_gradient=self.pair * stage.input_gradient,
                weight_gradient=self.pair * stage.weight_gradient,
                hidden=self.pair * stage.hidden,
            )
            for stage in self.stages
        )
        return replace(self, stages=stages)

    def longer_by(self, seconds: float) -> Self:
        """Return the costs where every action takes so many ``seconds`` more; a whole backward is one."""
        stages = tuple(
            replace(
                stage,
                **{name: getattr(stage, name) + seconds for name in (*_TIMES, "hidden")},
            )
            for stage in self.stages
        )
        head = self.head and replace(
            self.head, scores=self.head.scores + seconds, weight_gradient=self.head.weight_gradient + seconds
        )
        return replace(self, stages=stages, head=head)

    def waiting_for_messages(self, placement: Placement, *, at_once: bool = False) -> Self:
        """Return the costs where a rank does nothing until each message that it sends has arrived.

        A forward or a backward then takes as much longer as its message is on its way, and half of that where
        both travel ``at_once``.
        """
        hop = self.hop / 2 if at_once else self.hop

        def way(stage: int) -> float:
            is_sent = 0 <= stage < placement.stages - 1
            return hop if is_sent and placement.rank_of(stage) != placement.rank_of(stage + 1) else 0.0

        stages = tuple(
            replace(
                stage,
                forward=stage.forward + way(number),
                input_gradient=stage.input_gradient + way(number - 1),
            )
            for number, stage in enumerate(self.stages)
        )
        return replace(self, stages=stages, hop=0.0)

    def growth(self, action: Action) -> float:
        """Return the memory that ``action`` takes at its start; its end frees what is not kept."""
        if action.kind in (Kind.S, Kind.T):
            return max(0.0, self.kept(action))
        return self.stages[action.stage].growth(action.kind)

    def kept(self, action: Action) -> float:
        """Return by how much more activations are kept after ``action`` than before; below 0, less."""
        if action.kind is Kind.S:
            return self._head(action).activation
        if action.kind is Kind.T:
            return -self._head(action).activation
        return self.stages[action.stage].kept(action.kind)

    def _head(self, action: Action) -> HeadCosts:
        if self.head is None:
            raise ValueError(
                f"{action} is work on a split head, for which no costs are given: set Costs.head"
            )
        return self.head

    @classmethod
    def unit(cls, placement: Placement) -> Self:
        """Return the papers' unit costs: F, I and W take 1, a message takes 0, a chunk's activations count 1.

        A split head takes 1 as well, of which each rank has its part.
        """
        costs = cls.uniform(placement, forward=1.0, input_gradient=1.0, weight_gradient=1.0)
        return costs.with_split_head(1.0, placement.ranks) if placement.splits_head else costs

    @classmethod
    def uniform(
        cls,
        placement: Placement,
        *,
        forward: float,
        input_gradient: float,
        weight_gradient: float,
        hop: float = 0.0,
    ) -> Self:
        """Return the same times for every stage; a chunk's activations count 1 and are kept until its W."""
        stage = StageCosts(forward, input_gradient, weight_gradient)
        return cls((stage,) * placement.stages, hop)

    @classmethod
    def per_rank(
        cls,
        ranks: int,
        chunks: int = 1,
        *,
        forward: float = 1.0,
        input_gradient: float = 1.0,
        weight_gradient: float = 1.0,
        hop: float = 0.0,
    ) -> Self:
        """Return the times of a whole rank for one microbatch, of which each of its ``chunks`` takes a part.

        The parts are equal, and a rank's activations of one microbatch count 1, so that schedules with
        different numbers of chunks compare.
        """
        f, i, w = (seconds / chunks for seconds in (forward, input_gradient, weight_gradient))
        return cls((StageCosts(f, i, w, activation=1 / chunks),) * (ranks * chunks), hop)

    def with_output_layer(self, seconds: float) -> Self:
        """Return the costs with an output layer on the last stage; F, I and W each take ``seconds`` more."""
        *before, last = self.stages
        last = replace(last, **{name: getattr(last, name) + seconds for name in _TIMES})
        return replace(self, stages=(*before, last))

    def with_split_head(self, seconds: float, ranks: int) -> Self:
        """Return the costs with a head that is split over ``ranks``; its F, I and W take ``seconds`` each.

        An S does a rank's part of F and I, and a T that of W.
        """
        part = seconds / ranks
        return replace(self, head=HeadCosts(2 * part, part).exchanged_over(self.hop))

    def copied_at(self, seconds: float) -> Self:
        """Return the costs with copies to the host that take ``seconds`` for each 1 of activations."""
        return replace(
            self, stages=tuple(replace(stage, copy=seconds * stage.activation) for stage in self.stages)
        )

    def merged(self, stages: int) -> Self:
        """Return the costs of the same model cut into fewer ``stages``, each made of neighbouring ones.

        Times and activations add up; the messages between merged stages disappear.  Raises ValueError
        where the stages do not merge evenly.
        """
        neighbours, remainder = divmod(len(self.stages), stages)
        if remainder or not neighbours:
            raise ValueError(
                f"costs of {len(self.stages)} stages cannot be merged into {stages}: "
                f"give costs for a multiple of {stages} stages"
            )
        if neighbours == 1:
            return self
        return self.joined([neighbours] * stages)

    def joined(self, counts: Sequence[int]) -> Self:
        """Return the costs of stages of ``counts`` of these each, in order.

        All figures of a stage add up but the workspace: parts of an I run one after the other.  Raises
        ValueError where ``counts`` are not of all stages, or one is 0.
        """
        if sum(counts) != len(self.stages) or 0 in counts:
            raise ValueError(
                f"costs of {len(self.stages)} stages cannot be joined by {list(counts)}: let these add up to "
                f"{len(self.stages)}, each 1 or more"
            )
        ends = list(accumulate(counts))
        groups = [slice(first, end) for first, end in zip([0, *ends], ends, strict=False)]
        sequence = tuple(_stored_together(self.sequence[group]) for group in groups if self.sequence)
        stages = tuple(_added(self.stages[group]) for group in groups)
        return replace(self, stages=stages, sequence=sequence)


class CostModel:
    """The costs of a model's stages under any placement; where that splits the head, without it.

    ``estimate`` returns this for a placement, for which it is asked once.  ``of_lengths`` returns the model
    for microbatches of so many tokens in each of so many sequences, where that is known.
    """

    def __init__(
        self,
        estimate: Callable[[Placement], Costs],
        of_lengths: "Callable[[int, int], CostModel] | None" = None,
    ) -> None:
        self._estimate, self._of_lengths = estimate, of_lengths
        self._known: dict[tuple[int, bool], Costs] = {}

    @classmethod
    def fixed(cls, costs: Costs) -> Self:
        """Return the model that has ``costs``, merged where there are fewer stages."""
        return cls(lambda placement: costs.merged(placement.stages))

    def of(self, placement: Placement) -> Costs:
        """Return the costs of the stages of ``placement``; raises what ``estimate`` raises."""
        key = placement.stages, placement.splits_head
        if key not in self._known:
            self._known[key] = self._estimate(placement)
        return self._known[key]

    def known(self, placement: Placement) -> Costs | None:
        """Return the costs of the stages of ``placement`` where they were asked for."""
        return self._known.get((placement.stages, placement.splits_head))

    def merged_from(self, finest: Placement) -> "CostModel":
        """Return the model in which stages are merged of those of ``finest``."""

        def merged(placement: Placement) -> Costs:
            costs = self.of(replace(finest, splits_head=placement.splits_head))
            return costs.merged(placement.stages)

        return CostModel(merged, self._of_lengths)

    def at(self, tokens: int, sequences: int) -> "CostModel":
        """Return the model for microbatches of ``sequences`` sequences of ``tokens`` each.

        ValueError where the costs are those of one length.
        """
        if self._of_lengths is None:
            raise ValueError("these costs are those of one length")
        return self._of_lengths(tokens, sequences)


def _added(stages: Sequence[StageCosts]) -> StageCosts:
    """Return the costs of neighbouring ``stages`` as one."""
    sums = (math.fsum(getattr(stage, cost.name) for stage in stages) for cost in fields(StageCosts))
    workspace = {kind: _taken(stages, kind) for kind in (Kind.I, Kind.B)}
    return replace(StageCosts(*sums), workspace=workspace[Kind.I], workspace_in_whole=workspace[Kind.B])


def _stored_together(stages: Sequence[SequenceMemory]) -> SequenceMemory:
    """Return the memory that slices share in neighbouring ``stages``."""
    return SequenceMemory(
        *(math.fsum(getattr(stage, name) for stage in stages) for name in SequenceMemory.__slots__)
    )


def _taken(stages: Sequence[StageCosts], kind: Kind) -> float:
    """Return the workspace of backwards of ``stages``, one after the other: memory besides what is kept."""
    peak = held = 0.0
    for stage in reversed(stages):
        peak = max(peak, held + stage.growth(kind))
        held += stage.kept(kind)
    return peak - max(0.0, held)


def _require_finite(costs: object, name: str, *, positive: bool) -> None:
    """Refuse NaN, a value above ``MOST``, a negative one and, where ``positive``, zero."""
    value = getattr(costs, name)
    if not 0 <= value <= MOST or (positive and value == 0):
        rule = "above 0" if positive else "0 or more"
        raise ValueError(
            f"{type(costs).__name__}.{name} is {value}, but must be a finite number {rule}, at most "
            f"{MOST:g}: correct the measured costs"
        )


@dataclass(frozen=True, slots=True)
class UnitCosts(Costs):
    """Costs with ``units``, one for each microbatch of the schedule, in its order.

    ``stages`` and ``vocabulary`` are of a mean microbatch, by which memory is counted in microbatches;
    seconds and memory of an action are its microbatch's own.  Messages take ``hop``, and pairs ``pair``,
    whichever microbatches they are of.  ``tokens`` has the number for each microbatch.  Where microbatches
    are slices, ``shared`` has for each the memory of every stage that is their sequence's; it is empty where
    there is none.  ValueError for a unit with another number of stages, and for tokens or shared memory of
    another number of microbatches.
    """

    units: tuple[Costs, ...] = ()
    tokens: tuple[int, ...] = ()
    shared: tuple[tuple[SharedMemory, ...], ...] = ()

    def __post_init__(self) -> None:
        Costs.__post_init__(self)
        for number, unit in enumerate(self.units):
            if len(unit.stages) != len(self.stages):
                raise ValueError(
                    f"unit {number} has costs of {len(unit.stages)} stages, but there are "
                    f"{len(self.stages)}: give one StageCosts a stage"
                )
        if len(self.tokens) != len(self.units):
            raise ValueError(
                f"there are tokens of {len(self.tokens)} microbatches and costs of {len(self.units)}: give "
                "both for each"
            )
        if len(self.shared) not in (0, len(self.units)):
            raise ValueError(
                f"there is shared memory of {len(self.shared)} microbatches and costs of {len(self.units)}: "
                "give both for each"
            )

    @property
    def are_alike(self) -> bool:
        """Whether microbatches have no costs of their own."""
        return not self.units

    def seconds(self, action: Action) -> float:
        """Return how long ``action`` keeps its rank busy; ValueError for a microbatch without a unit."""
        return self._of(action).seconds(action)

    def growth(self, action: Action) -> float:
        """Return the memory that ``action`` takes at its start; its end frees what is not kept."""
        growth, shared = self._of(action).growth(action), self._shared(action)
        if action.kind is Kind.F:
            return growth + shared.by_forward
        return growth + shared.by_input_gradient if action.kind in (Kind.I, Kind.B) else growth

    def kept(self, action: Action) -> float:
        """Return by how much more is kept after ``action`` than before; below 0, less."""
        kept, shared = self._of(action).kept(action), self._shared(action)
        if action.kind is Kind.F:
            return kept + shared.by_forward
        is_backward = action.kind in (Kind.I, Kind.B)
        return kept + shared.by_input_gradient - shared.returned if is_backward else kept

    def joined(self, counts: Sequence[int]) -> Self:
        """Return the costs of stages of ``counts`` of these each, for every unit; see ``Costs.joined``.

        Stages that are joined run their I right after each other, and share memory for as long as any does.
        """
        ends = list(accumulate(counts))
        groups = [slice(first, end) for first, end in zip([0, *ends], ends, strict=False)]
        return replace(
            self,
            stages=Costs(self.stages).joined(counts).stages,
            sequence=(),
            units=tuple(unit.joined(counts) for unit in self.units),
            shared=tuple(
                tuple(SharedMemory(*map(math.fsum, zip(*stages[group], strict=True))) for group in groups)
                for stages in self.shared
            ),
        )

    def ordered(self, order: Sequence[int]) -> Self:
        """Return the costs of the step whose microbatch k is ``order[k]`` of this one."""
        return replace(
            self,
            units=tuple(self.units[number] for number in order),
            tokens=tuple(self.tokens[number] for number in order),
            shared=tuple(self.shared[number] for number in order if self.shared),
        )

    def _shared(self, action: Action) -> SharedMemory:
        is_of_head = action.kind in (Kind.S, Kind.T)
        return self.shared[action.microbatch][action.stage] if self.shared and not is_of_head else _NONE

    def _of(self, action: Action) -> Costs:
        if not 0 <= action.microbatch < len(self.units):
            raise ValueError(
                f"{action} is of a microbatch without costs, there are {len(self.units)}: give one unit for "
                "each microbatch of the schedule"
            )
        return self.units[action.microbatch]
