"""Flags that a search leaves to its user, and what each would bring to the best that it finds.

They keep a step's results, up to rounding or as noted, and change its seconds or its bytes.  To try them
everywhere would multiply the configurations, so that each is estimated for the best, and those that shorten
it together for all that are nearly as good.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import Any

from megatron_pp_ext.costs.system import System
from megatron_pp_ext.features.pairs.order import Pairs
from megatron_pp_ext.job.flag_table import by_name, spelled
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.search.candidate import Candidate, offered
from megatron_pp_ext.planner.search.compiled import Compiler
from megatron_pp_ext.planner.search.configurations import Space
from megatron_pp_ext.planner.search.replays import Evaluated, Replays, Workloads
from megatron_pp_ext.planner.search.result import SearchResult
from megatron_pp_ext.planner.step.estimate import RankMemory
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.entry import AUTO

type Variation = Callable[[Space, Candidate], Iterable[Candidate]]
"""Returns the candidates in the place of one, in the space of the job with the flag."""


def _as_it_is(space: Space, candidate: Candidate) -> Iterator[Candidate]:
    yield candidate


def _shared(space: Space, candidate: Candidate) -> Iterator[Candidate]:
    yield replace(candidate, splits_head=True)


def _in_pairs(space: Space, candidate: Candidate) -> Iterator[Candidate]:
    """Yield ``candidate`` in pairs, under its own schedule and under all that have pairs."""
    paired = replace(candidate, options=(*candidate.options, Pairs()), limit=None)
    for chunks, names in space.orders(paired):
        yield from (
            replace(paired, schedule=name, chunks=chunks)
            for name in names
            if catalog.entry(name).make_paired is not None
        )


def _as_features_choose(space: Space, candidate: Candidate) -> Iterator[Candidate]:
    """Yield ``candidate`` with the first choices that features have in the space."""
    for variants in offered():
        choices = (choice for choice in variants.cuts(space.job, candidate) if choice != candidate)
        yield from islice(choices, _CHOICES)


_CHOICES = 2
"""The choices of a feature, such as lengths of slices, with which a candidate is estimated."""

_LONG = 16384
"""The tokens of a sequence from which on slices are estimated, whose plans take up to a second."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One or two flags that a user may add: ``values`` by the names of their arguments.

    ``suits`` is whether they could change a step, and ``note`` what else they change, in words.
    """

    values: Mapping[str, Any]
    suits: Callable[[Job, Candidate, System], bool]
    note: str = ""
    variation: Variation = _as_it_is

    @property
    def words(self) -> str:
        """The flags as on a command line."""
        return " ".join(spelled(self.values))


def _exchanges(job: Job, candidate: Candidate) -> bool:
    return bool(job.model.num_experts) and candidate.expert > 1


def _sends_by(job: Job, dispatcher: str, backend: str = "") -> bool:
    parallel = job.parallel
    is_same = parallel.moe_token_dispatcher_type == dispatcher
    return is_same and (not backend or parallel.moe_flex_dispatcher_backend == backend)


def _is_nvidia(system: System) -> bool:
    return not system.name.startswith("mi")


def _uses(backend: str) -> dict[str, str]:
    return {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend}


SETTINGS = (
    Setting(
        {"tp_comm_overlap": True},
        lambda job, candidate, system: candidate.tensor > 1 and not job.parallel.tp_comm_overlap,
    ),
    Setting(
        {"grad_reduce_in_bf16": True},
        lambda job, candidate, system: job.precision.bf16 and job.precision.gradient_size > 2,
        "gradients are summed in bf16",
    ),
    Setting(
        {"moe_token_dispatcher_type": "alltoall"},
        lambda job, candidate, system: _exchanges(job, candidate) and not _sends_by(job, "alltoall"),
    ),
    Setting(
        _uses("deepep"),
        lambda job, candidate, system: (
            _exchanges(job, candidate)
            and not _sends_by(job, "flex", "deepep")
            and _is_nvidia(system)
            and not system.gpus_per_domain
        ),
    ),
    Setting(
        _uses("hybridep"),
        lambda job, candidate, system: (
            _exchanges(job, candidate) and not _sends_by(job, "flex", "hybridep") and _is_nvidia(system)
        ),
    ),
    Setting(
        {"overlap_moe_expert_parallel_comm": True},
        lambda job, candidate, system: (
            _exchanges(job, candidate)
            and not job.parallel.overlap_moe_expert_parallel_comm
            and not candidate.splits_head
            and candidate.planned is None
        ),
        variation=_in_pairs,
    ),
    Setting(
        {"pipeline_vocabulary": "shared"},
        lambda job, candidate, system: (
            job.pipeline.pipeline_vocabulary is None
            and candidate.pipeline > 1
            and candidate.schedule not in candidate.stock
        ),
        variation=_shared,
    ),
    Setting(
        {"pipeline_slice_tokens": AUTO},
        lambda job, candidate, system: (
            job.pipeline.pipeline_slice_tokens is None
            and candidate.pipeline > 1
            and candidate.schedule not in candidate.stock
            and job.model.seq_length >= _LONG
        ),
        "gradients are summed over slices",
        variation=_as_features_choose,
    ),
    Setting(
        {"cross_entropy_loss_fusion": True},
        lambda job, candidate, system: not job.precision.cross_entropy_loss_fusion,
    ),
    Setting(
        {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
        lambda job, candidate, system: not job.precision.has_loss_in_place,
    ),
    Setting(
        {"fp8_param_gather": True},
        lambda job, candidate, system: bool(job.precision.fp8) and not job.precision.keeps_operands,
    ),
)
"""The settings in the order in which they are estimated."""


@dataclass(frozen=True, slots=True)
class Gain:
    """The ``outcome`` of the best with a ``setting``: its estimate, or the rank for which memory lacks.

    ``refusal`` is Megatron's, in words, and empty where it accepts the setting.
    """

    setting: Setting
    outcome: Evaluated | RankMemory
    refusal: str = ""

    def seconds(self, best: Evaluated) -> float:
        """Return the seconds by which the step of ``best`` gets shorter."""
        return best.seconds - self.outcome.seconds if isinstance(self.outcome, Evaluated) else 0.0

    def is_worth(self, best: Evaluated) -> bool:
        """Whether the step of ``best`` gets shorter, or its fullest rank needs less, by what can be seen."""
        if not isinstance(self.outcome, Evaluated) or self.refusal:
            return False
        is_smaller = self.outcome.bytes < (1 - _SEEN) * best.bytes
        least = -_SEEN if is_smaller else _SEEN
        return self.seconds(best) > least * best.seconds


_SEEN = 0.001
"""The part of a step, or of the bytes of a rank, that a flag has to save to be named."""


@dataclass(frozen=True, slots=True)
class FlagGains:
    """The ``gains`` of flags for ``best``, and ``shortest`` of ``count`` candidates with ``chosen`` flags.

    ``chosen`` are those that together make the step of ``best`` shortest.  ``shortest`` is None where none
    does.  ``remaining`` were not estimated, since the others took too long.
    """

    best: Evaluated
    gains: tuple[Gain, ...]
    chosen: tuple[Setting, ...] = ()
    shortest: Evaluated | None = None
    count: int = 0
    remaining: tuple[Setting, ...] = ()

    @property
    def words(self) -> str:
        """The chosen flags as on a command line."""
        return " ".join(spelled(_values(self.chosen)))

    def flags(self, words: Sequence[str]) -> list[str]:
        """Return ``words``, a command line, with the chosen flags and with those of the shortest step."""
        assert self.shortest is not None
        return with_values(words, _values(self.chosen), self.shortest.candidate)

    @property
    def lines(self) -> list[str]:
        """What each flag brings, a line each, and then the shortest step with all that shorten it."""
        worth = [gain for gain in self.gains if gain.is_worth(self.best)]
        refused = [gain for gain in self.gains if gain.refusal]
        little = [gain for gain in self.gains if gain not in worth and not gain.refusal]
        lines = [
            f"{gain.setting.words}: {self._numbers(gain)}"
            for gain in sorted(worth, key=lambda gain: -gain.seconds(self.best))
        ]
        lines += [f"{gain.setting.words}: {gain.refusal}" for gain in refused]
        if little:
            lines.append(f"little or no gain with {', '.join(map(self._other, little))}")
        if self.remaining:
            lines.append(f"not estimated: {', '.join(setting.words for setting in self.remaining)}")
        if self.shortest is not None:
            shortest = self.shortest
            lines.append(
                f"with {self.words} the shortest of {self.count} that are nearly as good takes "
                f"{shortest.seconds:.4g} s ({shortest.seconds / self.best.seconds - 1:+.1%}) and "
                f"{shortest.bytes / 1e9:.1f} GB: {shortest.candidate.name}; a search with these flags after "
                "-- tries them everywhere"
            )
        return lines

    def _numbers(self, gain: Gain) -> str:
        """Return the step and the fullest rank with a flag, and what changes."""
        assert isinstance(gain.outcome, Evaluated)
        more = (gain.outcome.bytes - self.best.bytes) / 1e9
        note = f"; {gain.setting.note}" if gain.setting.note else ""
        order = gain.outcome.candidate.order
        under = f" under {order}" if order != self.best.candidate.order else ""
        return (
            f"{gain.outcome.seconds:.4g} s ({-gain.seconds(self.best):+.3g} s){under}, "
            f"{gain.outcome.bytes / 1e9:.1f} GB ({more:+.1f} GB){note}"
        )

    def _other(self, gain: Gain) -> str:
        if isinstance(gain.outcome, Evaluated):
            return f"{gain.setting.words} ({-gain.seconds(self.best):+.3g} s)"
        return f"{gain.setting.words} ({gain.outcome.total / 1e9:.1f} GB, which do not fit)"

    def record(self) -> list[dict[str, Any]]:
        """Return the gains for a JSON file; the seconds are null for what does not fit."""
        return [
            {
                "flags": gain.setting.words,
                "step_seconds": gain.outcome.seconds if isinstance(gain.outcome, Evaluated) else None,
                "bytes": gain.outcome.bytes if isinstance(gain.outcome, Evaluated) else gain.outcome.total,
                "note": gain.setting.note,
                "refusal": gain.refusal,
            }
            for gain in self.gains
        ]


def with_values(words: Sequence[str], values: Mapping[str, Any], candidate: Candidate) -> list[str]:
    """Return ``words``, a command line, with the flags that set ``values`` and with those of ``candidate``.

    What a candidate sets itself comes with it, such as --pipeline-vocabulary.
    """
    flags = {word for word in spelled(values) if word.startswith("--")}
    rest = [word for name, given in by_name(words) if name not in flags for word in (name, *given)]
    return candidate.flags([*rest, *spelled(values)])


def _values(settings: Iterable[Setting]) -> dict[str, Any]:
    return {name: value for setting in settings for name, value in setting.values.items()}


def _is_compiled(candidate: Candidate) -> bool:
    return catalog.abilities(candidate.schedule).is_compiled


def _to_vary(result: SearchResult) -> Evaluated:
    """Return the best whose order is no compiled one, which would take seconds for each flag, if any is."""
    rows = (row for row in result.named if not _is_compiled(row.candidate))
    return min(rows, key=lambda row: row.seconds, default=result.best[0])


_OTHERS = 2
"""The schedules that are estimated with all flags, of those nearly as fast as one of the best."""

_NEAR = 1.25
"""The part of the best step up to which one of less memory is estimated with all flags."""

_ASKED = 3
"""The candidates about which Megatron is asked whether it accepts all flags, until it does."""

_MOST_SECONDS = 10.0
"""The seconds of a processor after which no further flag is estimated, and no further candidate."""


@dataclass
class Trials:
    """Estimates of candidates of ``space``, a search for ``job``, with flags that it has not tried.

    ``refusal`` returns why Megatron refuses a candidate with values of arguments, or nothing where it accepts
    them.  The other fields are those of the search.
    """

    space: Space
    job: RequestedJob
    system: System
    limit: float
    margin: float
    refusal: Callable[[Candidate, Mapping[str, Any]], str] = lambda candidate, values: ""
    _workloads: dict[tuple[int, ...], Workloads] = field(default_factory=dict)
    _start: float = field(default_factory=time.process_time)

    def gains(self, result: SearchResult) -> FlagGains:
        """Return what flags bring to the best of ``result``; nothing for stages that were measured."""
        best = _to_vary(result)
        if self.space.stages is not None:
            return FlagGains(best, ())
        gains, remaining = list[Gain](), list[Setting]()
        for setting in SETTINGS:
            if not setting.suits(self.job, best.candidate, self.system):
                continue
            if self._is_late:
                remaining.append(setting)
            elif (gain := self._gain(setting, best)) is not None:
                gains.append(gain)
        chosen = self._together(best, gains)
        count, shortest = self._shortest(chosen, best, result) if chosen else (0, None)
        return FlagGains(best, tuple(gains), chosen, shortest, count, tuple(remaining))

    @property
    def _is_late(self) -> bool:
        return time.process_time() - self._start > _MOST_SECONDS

    def _gain(self, setting: Setting, best: Evaluated) -> Gain | None:
        outcome = self.outcome((setting,), best.candidate)
        if outcome is None:
            return None
        gain = Gain(setting, outcome)
        if isinstance(outcome, Evaluated) and gain.is_worth(best):
            return replace(gain, refusal=self.refusal(outcome.candidate, setting.values))
        return gain

    def _together(self, best: Evaluated, gains: Sequence[Gain]) -> tuple[Setting, ...]:
        """Return the flags that shorten the step of ``best`` together, that with the largest gain first."""
        chosen, seconds = tuple[Setting, ...](), best.seconds
        for gain in sorted(gains, key=lambda gain: -gain.seconds(best)):
            is_set = gain.setting.values.keys() & _values(chosen).keys()
            if is_set or not gain.is_worth(best):
                continue
            outcome = self.outcome((*chosen, gain.setting), best.candidate)
            if isinstance(outcome, Evaluated) and outcome.seconds < seconds:
                chosen, seconds = (*chosen, gain.setting), outcome.seconds
        return chosen

    def _shortest(
        self, chosen: Sequence[Setting], best: Evaluated, result: SearchResult
    ) -> tuple[int, Evaluated | None]:
        """Return the shortest step with the ``chosen`` flags that Megatron accepts, and of how many it is.

        They are the best with the schedules nearly as fast, those on the frontier, and what memory kept out.
        """
        rows = [row for first in result.best for row in (first, *result.alike[first.candidate][:_OTHERS])]
        near = [row for row in result.frontier if row.seconds < _NEAR * best.seconds]
        timed = dict.fromkeys(row.candidate for row in (best, *rows, *near))
        families = [candidate for candidate in timed if not _is_compiled(candidate)] or [best.candidate]
        count, shorter = 0, list[Evaluated]()
        for candidate in (*families, *(candidate for candidate, _ in result.too_large)):
            if self._is_late:
                break
            count += 1
            outcome = self.outcome(chosen, candidate, shorter[-1].seconds if shorter else inf)
            if isinstance(outcome, Evaluated):
                shorter.append(outcome)
        values, asked = _values(chosen), reversed(shorter[-_ASKED:])
        return count, next((row for row in asked if not self.refusal(row.candidate, values)), None)

    def outcome(
        self, settings: Sequence[Setting], candidate: Candidate, below: float = inf
    ) -> Evaluated | RankMemory | None:
        """Return the shortest step of ``candidate`` with ``settings``, or what it needs if none fits.

        None where a rule refuses them, and where no step is shorter than ``below`` seconds.
        """
        values = _values(settings)
        space = replace(self.space, job=self.space.job.changed(**values))
        varied = [replace(candidate, choice=None)]
        for setting in settings:
            varied = [other for each in varied for other in setting.variation(space, each)]
        if space.is_uneven:
            # Another layout may suit the flags better, and that of the candidate may be all that fits.
            same = [each for each in varied if each.placement == candidate.placement]
            varied = [*same, *dict.fromkeys(replace(each, layout=None) for each in varied)]
        key = tuple(map(id, settings))
        if key not in self._workloads:
            self._workloads[key] = Workloads(space.job, self.system.at_scale(space.gpus))
        outcomes = [
            outcome
            for each in varied
            if (outcome := self._estimated(space, self._workloads[key], each, values, below)) is not None
        ]
        fitting = [outcome for outcome in outcomes if isinstance(outcome, Evaluated)]
        if fitting:
            return min(fitting, key=lambda row: row.seconds)
        return next(iter(outcomes), None)

    def _estimated(
        self,
        space: Space,
        workloads: Workloads,
        candidate: Candidate,
        values: Mapping[str, Any],
        below: float,
    ) -> Evaluated | RankMemory | None:
        """Return the step of ``candidate``, or what it needs; None where there is none, as in ``outcome``."""
        outcome: Evaluated | RankMemory | str | None
        with suppress(ValueError):
            if _is_compiled(candidate):
                compiler = Compiler(space, workloads, self.limit, self.margin)
                outcome = compiler.compiled(replace(candidate, limit=None))
            else:
                replays = Replays(workloads, self.margin, space.is_uneven and candidate.layout is None)
                outcome = replays.replayed(
                    candidate, self.limit, lambda seconds: self.limit if seconds < below else 0.0
                )
            if isinstance(outcome, Evaluated):
                if outcome.seconds >= below:
                    return None
                job = outcome.candidate.applied_to(self.job.with_arguments(**values))
                all_rules.refuse_to_plan(job)
                for_world(job, space.gpus)
            return None if isinstance(outcome, str) else outcome
        return None
