"""What microbatches of unlike length cost: time for each token, and for each squared length of a document.

A stage takes ``per_token * tokens + per_square * sum of squared document lengths`` for a microbatch, with
factors of its own for F, I and W.  Attention alone has a part that goes by squares, and none in W.

It keeps memory for each token, and for each score where attention is not fused.  Slices of a sequence share
keys, values and sums of their gradients on top.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Self

from megatron_pp_ext.features.units.microbatches import (
    Microbatches,
    UnitSizes,
    require_number,
    whole_number,
)
from megatron_pp_ext.schedule.costs import (
    Costs,
    HeadCosts,
    SequenceMemory,
    SharedMemory,
    StageCosts,
    UnitCosts,
)

if TYPE_CHECKING:
    from megatron_pp_ext.features.units.units import Units


EQUAL_AT = 24_576
"""The length of a document whose attention takes as long as all else of its forward: that of a model of
7 billion parameters with full attention, which verl balances by."""

OVERHEAD = 128.0
"""The tokens that a microbatch, or a unit of one, costs on top of its own: for launches and small kernels."""

ATTENTION_BACKWARD = 2.5
"""The seconds of attention's backward by those of its forward: five products of matrices in place of two."""

LEAST = 1e-12
"""The part of a stage's time that is the least for any of F, I and W, which must not take nothing."""

_TIMES = "forward", "input_gradient", "weight_gradient"

AMOUNTS = "activation", "released_by_input_gradient", "workspace", "workspace_in_whole"
"""The memory of a stage, by the names of ``StageCosts``."""

_SINGULAR = 1e-9
"""The part by which tokens and squares must differ from being proportional."""

_NOTHING = SequenceMemory()

Times = tuple[float, float, float]
"""The seconds of F, I and W."""

Amounts = tuple[float, float, float, float]
"""The memory that F keeps and that I gives back, and the workspace of an I and of a whole backward."""


@dataclass(frozen=True, slots=True)
class StageRates:
    """The costs of one stage.

    Those in ``per_token`` and ``per_square`` are the seconds of F, I and W for a token and for a squared
    token.  ``activation`` is kept for each token, ``released`` the part of it that an I gives back, ``copy``
    the seconds in which it is copied to the host, and ``hidden`` those of I that a W hides.  An I has
    ``workspace``, and a whole backward ``workspace_in_whole``.  ``scores`` are the four amounts for each
    score, and ``slices`` the memory of a token in slices.

    Raises ValueError for a number that is not finite or below 0, but for what is ``released`` and workspaces,
    and for a forward or backward that takes no time.
    """

    per_token: Times
    per_square: Times
    activation: float = 1.0
    released: float = 0.0
    copy: float = 0.0
    hidden: float = 0.0
    workspace: float = 0.0
    workspace_in_whole: float = 0.0
    scores: Amounts = (0.0, 0.0, 0.0, 0.0)
    slices: SequenceMemory = _NOTHING

    def __post_init__(self) -> None:
        for name in ("per_token", "per_square"):
            for kind, seconds in zip("FIW", getattr(self, name), strict=True):
                require_number(f"StageRates.{name} of {kind}", seconds)
        if not any(self.per_token) and not any(self.per_square):
            raise ValueError("StageRates takes no time for any token: give per_token or per_square")
        for name in ("activation", "copy", "hidden"):
            require_number(f"StageRates.{name}", getattr(self, name))
        # A line through two lengths may be below 0 at none.
        for name in ("released", "workspace", "workspace_in_whole"):
            amount = getattr(self, name)
            below = isinstance(amount, float | int) and amount < 0
            require_number(f"StageRates.{name}", -amount if below else amount)

    @property
    def amounts(self) -> Amounts:
        """The memory for each token."""
        return self.activation, self.released, self.workspace, self.workspace_in_whole

    def costs(self, unit: UnitSizes, overhead: float = 0.0) -> StageCosts:
        """Return the costs of ``unit`` alone, without what slices share.

        It takes as long as with ``overhead`` tokens more, of which nothing is kept.
        """
        tokens = unit.tokens
        pairs = zip(self.per_token, self.per_square, strict=True)
        times = [each * (tokens + overhead) + quadratic * unit.squares for each, quadratic in pairs]
        f, i, w = (max(seconds, LEAST * sum(times)) for seconds in times)
        kept, released, workspace, in_whole = (
            tokens * each + unit.scores * of_score
            for each, of_score in zip(self.amounts, self.scores, strict=True)
        )
        slices = self.slices
        in_slices = unit.end * slices.expanded
        if unit.end:
            in_slices += unit.scores * slices.masks - tokens * slices.replaced
        kept = max(0.0, kept + in_slices)
        return StageCosts(
            f,
            i,
            w,
            kept,
            min(kept, released + in_slices),
            copy=tokens * self.copy,
            hidden=min((tokens + overhead) * self.hidden, w, (1 - LEAST) * i),
            workspace=max(0.0, workspace),
            workspace_in_whole=max(0.0, in_whole),
        )

    def shared(self, unit: UnitSizes) -> SharedMemory:
        """Return the memory that ``unit`` takes and gives back for all slices of its sequence."""
        stored, owed = self.slices.stored, self.slices.owed
        return SharedMemory(stored * unit.stored, owed * unit.owes, stored * unit.stored + owed * unit.owed)


@dataclass(frozen=True, slots=True)
class LengthCosts:
    """The costs of every stage by the lengths of documents.

    ``head`` are those of a rank's part of a shared vocabulary for one token, None where it is not
    shared.  ``hop``, ``message`` and ``pair`` are those of ``Costs`` for a microbatch of mean length: the
    time of messages is not counted by length.
    """

    stages: tuple[StageRates, ...]
    head: HeadCosts | None = None
    hop: float = 0.0
    message: float = 0.0
    pair: float = 1.0

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("LengthCosts.stages is empty: give the rates of each stage")
        require_number("LengthCosts.hop", self.hop)
        require_number("LengthCosts.message", self.message)
        require_number("LengthCosts.pair", self.pair)
        if not 0.5 <= self.pair <= 1:
            raise ValueError(
                f"LengthCosts.pair is {self.pair}, but a pair takes half to all of the sum of its actions: "
                "give 0.5 to 1"
            )

    @classmethod
    def with_attention(cls, costs: Costs, tokens: float, equal_at: float = EQUAL_AT) -> Self:
        """Return costs to which attention's part is added: ``costs`` are all else, for ``tokens`` tokens.

        A document of ``equal_at`` tokens takes as long for attention's forward as for all else of its
        forward, and ``ATTENTION_BACKWARD`` times as long in I.
        """
        require_number("equal_at", equal_at, "above 0", math.inf)
        require_number("tokens", tokens, "above 0")

        def rates(stage: StageCosts) -> StageRates:
            f, i, w = (
                seconds / tokens for seconds in (stage.forward, stage.input_gradient, stage.weight_gradient)
            )
            return _rates(stage, tokens, (f, i, w), (f / equal_at, ATTENTION_BACKWARD * f / equal_at, 0.0))

        return cls._of(costs, tokens, [rates(stage) for stage in costs.stages])

    @classmethod
    def measured(cls, costs: Costs, length: int, documents: int = 1, equal_at: float = EQUAL_AT) -> Self:
        """Return the costs of stages that take ``costs`` for so many ``documents`` of this ``length``.

        Which part of that is attention follows from ``equal_at``, as in ``with_attention``.
        """
        require_number("equal_at", equal_at, "above 0", math.inf)
        length, documents = whole_number("length", length), whole_number("documents", documents)
        tokens, squares = documents * length, documents * length**2

        def rates(stage: StageCosts) -> StageRates:
            f = stage.forward / (tokens + squares / equal_at)
            attention = ATTENTION_BACKWARD * f / equal_at
            i = max(0.0, stage.input_gradient - attention * squares) / tokens
            per_token = f, i, stage.weight_gradient / tokens
            return _rates(stage, tokens, per_token, (f / equal_at, attention, 0.0))

        return cls._of(costs, tokens, [rates(stage) for stage in costs.stages])

    @classmethod
    def through(cls, short: Costs, documents: int, long: Costs, length: int) -> Self:
        """Return the costs of stages that take ``long`` for one document of ``length`` tokens.

        They take ``short`` for so many shorter ``documents`` of as many tokens in all.  ValueError for fewer
        than 2 documents.
        """
        if whole_number("documents", documents) < 2:
            raise ValueError(f"costs are given for {documents} shorter documents: give them for 2 or more")
        length = whole_number("length", length)

        def rates(cut: StageCosts, whole: StageCosts) -> StageRates:
            pairs = [
                _line(getattr(cut, name) / length, length / documents, getattr(whole, name) / length, length)
                for name in _TIMES
            ]
            per_token, per_square = zip(*pairs, strict=True)
            scores = length * length * (1 - 1 / documents)
            kept, released, workspace, in_whole = (
                _of_score(getattr(cut, name), getattr(whole, name), scores) for name in AMOUNTS
            )
            return _rates(whole, length, per_token, per_square, (kept, released, workspace, in_whole))

        return cls._of(long, length, [rates(*both) for both in zip(short.stages, long.stages, strict=True)])

    @classmethod
    def fitted(cls, microbatches: Microbatches, measured: UnitCosts) -> Self:
        """Return the costs that come closest to those ``measured`` for ``microbatches``, by least squares.

        Where all microbatches have the same length, all is taken to go by tokens.  ValueError for another
        number of microbatches.
        """
        if len(measured.units) != len(microbatches):
            raise ValueError(
                f"{len(measured.units)} microbatches were measured, but there are lengths of "
                f"{len(microbatches)}: give both for the same step"
            )
        mean = sum(microbatches.tokens) / len(microbatches)

        def rates(stage: int) -> StageRates:
            units = [unit.stages[stage] for unit in measured.units]
            pairs = [_nearest(microbatches, [getattr(unit, name) for unit in units]) for name in _TIMES]
            per_token, per_square = zip(*pairs, strict=True)
            return _rates(measured.stages[stage], mean, per_token, per_square)

        return cls._of(measured, mean, [rates(stage) for stage in range(len(measured.stages))])

    @classmethod
    def _of(cls, costs: Costs, tokens: float, stages: Sequence[StageRates]) -> Self:
        shared = costs.head
        if shared is not None:
            shared = replace(
                shared,
                scores=shared.scores / tokens,
                weight_gradient=shared.weight_gradient / tokens,
                activation=shared.activation / tokens,
            )
        with_slices = zip(stages, costs.sequence or [_NOTHING] * len(stages), strict=True)
        return cls(
            tuple(replace(stage, slices=memory.of_token(tokens)) for stage, memory in with_slices),
            shared,
            costs.hop,
            costs.message,
            costs.pair,
        )

    @property
    def equal_at(self) -> float:
        """The length of a document whose attention takes as long as all else of its forward.

        Infinite where nothing goes by squares.
        """
        tokens, squares = (
            sum(each) for each in zip(*((s.per_token[0], s.per_square[0]) for s in self.stages), strict=True)
        )
        return tokens / squares if squares > 0 else math.inf

    def merged(self, stages: int) -> Self:
        """Return the rates of the same model cut into fewer ``stages``; see ``Costs.merged``."""
        each = len(self.stages) // stages
        groups = [self.stages[first : first + each] for first in range(0, len(self.stages), each)]
        return replace(self, stages=tuple(map(_joined, groups)))

    def with_slices_of(self, model: "LengthCosts") -> Self:
        """Return the rates with what slices share in ``model``, for each unit of memory that a token keeps.

        So measured activations of any unit get what is known of the model alone.
        """
        stages = tuple(
            replace(stage, slices=other.slices.times(stage.activation / other.activation))
            if other.activation
            else stage
            for stage, other in zip(self.stages, model.stages, strict=True)
        )
        return replace(self, stages=stages)

    def of(self, step: "Microbatches | Units", overhead: float = 0.0) -> UnitCosts:
        """Return the costs of a step with these units; its ``stages`` are those of the mean one.

        ``overhead`` are the tokens that each costs on top of its own, of which nothing is kept.  Messages
        take as long as those of a mean unit.
        """
        count, tokens = len(step), step.tokens
        share = len(step.documents) / count
        sizes = step.sizes
        squares = sum(step.squares) / count
        mean = self._unit(UnitSizes(sum(tokens) / count, squares, squares), overhead)
        # Sequences that are cut alike have units of the same sizes.
        of_size = {size: self._unit(size, overhead) for size in dict.fromkeys(sizes)}
        shared_by = {size: tuple(stage.shared(size) for stage in self.stages) for size in of_size}
        units, shared = tuple(map(of_size.__getitem__, sizes)), tuple(map(shared_by.__getitem__, sizes))
        return UnitCosts(
            mean.stages,
            self.hop * share,
            self.message * share,
            mean.head,
            self.pair,
            units=units,
            tokens=tokens,
            shared=shared if any(map(any, chain.from_iterable(shared))) else (),
        )

    def work(self, microbatches: Microbatches) -> list[float]:
        """Return the seconds that all stages together work on each microbatch."""
        rates = [stage.per_token for stage in self.stages], [stage.per_square for stage in self.stages]
        per_token, per_square = (sum(map(sum, each)) for each in rates)
        pairs = zip(microbatches.tokens, microbatches.squares, strict=True)
        return [per_token * tokens + per_square * squares for tokens, squares in pairs]

    def _unit(self, unit: UnitSizes, overhead: float) -> Costs:
        shared, tokens = self.head, unit.tokens
        if shared is not None:
            shared = replace(
                shared,
                scores=tokens * shared.scores,
                weight_gradient=tokens * shared.weight_gradient,
                activation=tokens * shared.activation,
            )
        # Most stages are alike.
        each = {rates: rates.costs(unit, overhead) for rates in dict.fromkeys(self.stages)}
        return Costs(tuple(each[rates] for rates in self.stages), head=shared)


def _joined(stages: Sequence[StageRates]) -> StageRates:
    """Return the rates of neighbouring ``stages`` as one: all figures add up."""

    def added(name: str) -> Times:
        f, i, w = (math.fsum(each) for each in zip(*(getattr(stage, name) for stage in stages), strict=True))
        return f, i, w

    activation, released, copy, hidden = (
        math.fsum(getattr(stage, name) for stage in stages)
        for name in ("activation", "released", "copy", "hidden")
    )
    # The I of joined stages run one after the other.
    workspace = max(stage.workspace + max(0.0, -stage.released) for stage in stages) - max(0.0, -released)
    return StageRates(
        added("per_token"),
        added("per_square"),
        activation,
        released,
        copy,
        hidden,
        max(0.0, workspace),
        max(stage.workspace_in_whole for stage in stages),
        (
            math.fsum(stage.scores[0] for stage in stages),
            math.fsum(stage.scores[1] for stage in stages),
            max(stage.scores[2] for stage in stages),
            max(stage.scores[3] for stage in stages),
        ),
        SequenceMemory(
            *(math.fsum(getattr(stage.slices, name) for stage in stages) for name in SequenceMemory.__slots__)
        ),
    )


def _rates(
    stage: StageCosts,
    tokens: float,
    per_token: Times,
    per_square: Times,
    scores: Amounts = (0.0, 0.0, 0.0, 0.0),
) -> StageRates:
    """Return the rates of ``stage``, which takes ``scores`` of its memory for each squared token."""
    kept, released, workspace, in_whole = (
        getattr(stage, name) / tokens - of_score * tokens
        for name, of_score in zip(AMOUNTS, scores, strict=True)
    )
    return StageRates(
        per_token,
        per_square,
        kept,
        released,
        stage.copy / tokens,
        stage.hidden / tokens,
        workspace,
        in_whole,
        scores,
    )


def _of_score(short: float, long: float, scores: float) -> float:
    """Return the memory for each score where ``long`` has so many ``scores`` more than ``short``."""
    per_score = (long - short) / scores
    return per_score if abs(long - short) > _SINGULAR * abs(long) else 0.0


def _line(short: float, length: float, long: float, longer_length: float) -> tuple[float, float]:
    """Return (seconds a token, seconds a squared token) by those a token at two lengths; none is below 0."""
    per_square = max(0.0, (long - short) / (longer_length - length))
    per_token = long - per_square * longer_length
    return (per_token, per_square) if per_token >= 0 else (0.0, long / longer_length)


def _nearest(microbatches: Microbatches, seconds: Sequence[float]) -> tuple[float, float]:
    """Return (seconds a token, seconds a squared token) nearest to ``seconds``; none is below 0."""
    tokens, squares = microbatches.tokens, microbatches.squares

    def dot(first: Sequence[float], second: Sequence[float]) -> float:
        return math.fsum(a * b for a, b in zip(first, second, strict=True))

    tt, ts, ss = dot(tokens, tokens), dot(tokens, squares), dot(squares, squares)
    ty, sy = dot(tokens, seconds), dot(squares, seconds)
    determinant = tt * ss - ts * ts
    if determinant > _SINGULAR * tt * ss:
        per_token, per_square = (ty * ss - sy * ts) / determinant, (sy * tt - ty * ts) / determinant
        if per_token >= 0 and per_square >= 0:
            return per_token, per_square
        if per_token < 0:
            return 0.0, sy / ss
    return ty / tt, 0.0
