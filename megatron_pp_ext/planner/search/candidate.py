"""One way to run a model on a number of GPUs, its variants, and its spelling in Megatron's flags."""

from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from megatron_pp_ext.compiler.limits import Limit
from megatron_pp_ext.compiler.request import Option, Request, of_sizes
from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.job import options
from megatron_pp_ext.job import pipeline as memory_limit
from megatron_pp_ext.job.flag_table import spelled
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.typed_job import PLACES, Job
from megatron_pp_ext.planner.step.model_description import flag
from megatron_pp_ext.planner.step.programs import placement_of
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import as_written
from megatron_pp_ext.schedule.entry import NO_PIPELINE
from megatron_pp_ext.schedule.placement import Placement, linear, v

if TYPE_CHECKING:
    from megatron_pp_ext.planner.search.replays import Evaluated, Replays
    from megatron_pp_ext.planner.step.workload import Workload


class UnitWork(NamedTuple):
    """What the units of a microbatch take at least, as parts of the seconds of a whole one.

    ``microbatch`` is for all units one after the other, whose products have lower rates, and ``first`` for
    the longest one, which waits for no other.
    """

    microbatch: float
    first: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A feature's choice for a candidate.

    ``word`` is part of the candidate's name.  ``arguments`` are those of Megatron that it sets, as pairs of a
    name and a value, and ``record`` has its entries in a JSON file, by ``Variants.entries``.
    """

    word: str
    arguments: tuple[tuple[str, Any], ...]
    record: tuple[tuple[str, Any], ...]


class Variants:
    """The variants that one feature offers to a search.

    ``arguments`` and ``entries`` are the names in its choices.  ``label`` is the word of a choice, with what
    it stands for.  ``option`` is the class of its options in candidates, None where it has none.  Of those
    with the same sizes and schedule ``most`` are timed, and ``beyond`` are words about the others.
    """

    arguments: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()
    label: tuple[str, str] = ("", "")
    option: type[Option] | None = None
    most: int = 0
    beyond: str = ""

    def refuse(self, job: RequestedJob) -> None:
        """Raise ValueError, in one line, for flags that choose what a search has to choose."""

    def cuts(self, job: Job, cut: "Candidate") -> Iterator["Candidate"]:
        """Yield ``cut`` and what the feature has in its place, of what ``job`` leaves to a search."""
        yield cut

    def permits(self, job: Job, candidate: "Candidate") -> bool:
        """Whether ``candidate``, which has its microbatches, is worth a look."""
        return True

    def least(self, candidate: "Candidate", job: Job, seconds: Callable[[Job], float]) -> UnitWork | None:
        """Return what the units of ``candidate`` take at least, None where microbatches stay whole.

        ``job`` is as the candidate sets it, and ``seconds`` returns those of a microbatch of a job.
        """
        return None

    def in_job(self, option: Option, job: Job) -> Option:
        """Return an ``option`` of the feature as ``job`` requests it."""
        return option

    def planned(self, option: Option, work: "Workload") -> Option:
        """Return an ``option`` of the feature with the costs of ``work``, by which it is planned."""
        return option

    def record(self, candidate: "Candidate") -> dict[str, Any]:
        """Return the entries of a ``candidate`` with the feature's option in a JSON file."""
        return {}

    def are_tried(self, job: Job) -> bool:
        """Whether a search for ``job`` tries them; the largest stage of a rank is then all that it keeps."""
        return False

    def replayed(
        self, replays: "Replays", candidate: "Candidate", limit: float, room: Callable[[float], float]
    ) -> "Evaluated | None":
        """Return a variant of ``candidate`` that fits; None if there is none.  See ``Replays.replayed``."""
        return None


def offered() -> list[Variants]:
    """Return the variants of all features."""
    return list(filter(None, (feature.variants() for feature in FEATURES)))


def tried(job: Job) -> tuple[Variants, ...]:
    """Return the variants that a search for ``job`` tries."""
    return tuple(variants for variants in offered() if variants.are_tried(job))


def of_option(option: Option) -> Variants:
    """Return the variants of the feature whose ``option`` it is; those of no feature where there is none."""
    having = (variants for variants in offered() if variants.option and isinstance(option, variants.option))
    return next(having, Variants())


def arguments() -> Iterator[str]:
    """Yield the arguments of Megatron that choices set."""
    for variants in offered():
        yield from variants.arguments


def entries() -> Iterator[str]:
    """Yield the entries of choices in a JSON file."""
    for variants in offered():
        yield from variants.entries


@dataclass(frozen=True, slots=True)
class Recompute:
    """The activations that a backward computes again, as values of Megatron's recompute flags."""

    name: str
    granularity: str | None = None
    method: str | None = None
    layers: int | None = None
    modules: tuple[str, ...] = ()

    def values(self) -> dict[str, Any]:
        """Return the arguments that it sets."""
        return {
            "recompute_granularity": self.granularity,
            "recompute_method": self.method,
            "recompute_num_layers": self.layers,
            "recompute_modules": self.modules or None,
        }


@dataclass(frozen=True, slots=True)
class Candidate:
    """The sizes of every kind of parallelism, the microbatch, the recomputation and the schedule.

    ``expert_tensor`` is the tensor-parallel size of experts, None where it is that of the other layers.
    ``layout`` is --pipeline-model-parallel-layout, None for stages as Megatron cuts them, and ``pattern``
    --hybrid-layer-pattern, None where it is the user's.  ``limit`` is the memory limit of ``flex``, for all
    ranks or for each (``job.pipeline``).  ``options`` are those of features that the user asks for.
    ``stock`` are the schedules that Megatron's own are, without --pipeline-schedule.  ``choice`` is what a
    feature has chosen, None where none has.
    """

    tensor: int
    context: int
    expert: int
    pipeline: int
    data: int
    micro_batch: int
    microbatches: int
    recompute: Recompute
    schedule: str = NO_PIPELINE
    chunks: int = 1
    splits_head: bool = False
    limit: Limit | None = None
    expert_tensor: int | None = None
    layout: str | None = None
    pattern: str | None = None
    options: tuple[Option, ...] = ()
    stock: tuple[str, ...] = ()
    choice: Choice | None = None

    @property
    def name(self) -> str:
        """A short name, fit for a file: only differences from one rank and no recomputation."""
        sizes = (("tp", self.tensor), ("cp", self.context), ("ep", self.expert), ("pp", self.pipeline))
        words = [f"{letters}{size}" for letters, size in sizes if size > 1]
        if self.expert_tensor is not None:
            words.append(f"etp{self.expert_tensor}")
        words += [f"dp{self.data}", f"mb{self.micro_batch}"]
        if self.pipeline > 1:
            words.append(self.order)
        if self.splits_head:
            words.append("shared")
        if self.recompute.granularity:
            words.append(self.recompute.name)
        words += [option.word for option in self.options if option.word]
        if self.layout is not None:
            words.append("uneven")
        if self.choice is not None:
            words.append(self.choice.word)
        return "-".join(words)

    @property
    def order(self) -> str:
        """A short name of its schedule, with the chunks a rank from three on."""
        return self.schedule if self.chunks < 3 else f"{self.schedule}{self.chunks}"

    def option[T: Option](self, kind: type[T]) -> T | None:
        """Return the option of this class, or None."""
        return next((option for option in self.options if isinstance(option, kind)), None)

    @property
    def planned(self) -> Option | None:
        """The option by which its order is planned by the costs of its stages, None for any other order."""
        return next((option for option in self.options if option.is_planned), None)

    @property
    def unplanned(self) -> Self:
        """The candidate without the option by which its order is planned."""
        return replace(self, options=tuple(option for option in self.options if not option.is_planned))

    @property
    def apart_from_schedule(self) -> Self:
        """The candidate without its schedule, and without the stages, limit and choice that go with it."""
        recompute = Recompute(self.recompute.name)
        sizes = replace(self, schedule=NO_PIPELINE, chunks=1, limit=None, recompute=recompute)
        return replace(sizes, layout=None, pattern=None, choice=None)

    @property
    def describes_stages(self) -> bool:
        """Whether it sets the layers of each stage."""
        return self.layout is not None or self.pattern is not None

    @property
    def placement(self) -> Placement:
        """The placement of its stages; for ``flex`` a V, until the compiler has chosen one."""
        if catalog.abilities(self.schedule).is_compiled:
            return replace(v(self.pipeline), splits_head=self.splits_head)
        return placement_of(self.schedule, self.pipeline, self.chunks, self.splits_head)

    @property
    def _request(self) -> Request:
        """The request that the flags of features refer to; the placement stands for any of these ranks."""
        return Request(
            self.schedule,
            (linear(self.pipeline),),
            self.microbatches,
            False,
            splits_head=self.splits_head,
            options=self.options,
        )

    def request(self, microbatches: int) -> Request:
        """Return the request for its schedule with so many microbatches; not for ``flex``."""
        return of_sizes(
            self.schedule,
            self.pipeline,
            microbatches,
            self.chunks,
            splits_head=self.splits_head,
            options=self.options,
        )

    def described(self, job: Job) -> Job:
        """Return ``job`` with everything set as this candidate sets it."""
        return job.changed(**self._values())

    def applied_to(self, job: RequestedJob) -> RequestedJob:
        """Return ``job`` with everything set as this candidate sets it."""
        return job.with_arguments(**self._values())

    def flags(self, model: Sequence[str] = ()) -> list[str]:
        """Return ``model``, the words of a command line, with this candidate's values in place of its own."""
        patterns = () if self.pattern is None else ("hybrid_layer_pattern", "hybrid_override_pattern")
        return [*strip(model, patterns), *spelled(self._values())]

    def record(self) -> dict[str, Any]:
        """Return it for a JSON file."""
        fields = as_written(self)
        del fields["choice"], fields["options"], fields["stock"]
        of_options = [of_option(option).record(self) for option in self.options]
        chosen = dict(self.choice.record if self.choice else ())
        return fields | dict.fromkeys(entries()) | chosen | dict(ChainMap(*of_options))

    def _values(self) -> dict[str, Any]:
        entry = catalog.ENTRIES.get(self.schedule)
        # Any other schedule has one number of chunks, which follows from its name, and a layout has its own.
        has_chunks = entry is not None and entry.more_chunks and not self.describes_stages
        pattern = {} if self.pattern is None else {"hybrid_layer_pattern": self.pattern}
        return pattern | {
            "tensor_model_parallel_size": self.tensor,
            "sequence_parallel": self.tensor > 1,
            "context_parallel_size": self.context,
            "expert_model_parallel_size": self.expert,
            "expert_tensor_parallel_size": self.expert_tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "num_virtual_stages_per_pipeline_rank": self.chunks if has_chunks else None,
            "pipeline_model_parallel_layout": self.layout,
            "pipeline_schedule": None if self.pipeline == 1 or self.schedule in self.stock else self.schedule,
            "pipeline_memory_limit": None if self.limit is None else memory_limit.spelled(self.limit),
            **{name: value for name, value in options.as_flags(self._request).items() if name in PLACES},
            **dict.fromkeys(arguments()),
            **dict(self.choice.arguments if self.choice else ()),
            "micro_batch_size": self.micro_batch,
            "global_batch_size": self.micro_batch * self.data * self.microbatches,
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            **self.recompute.values(),
        }


@cache
def _candidate_arguments() -> tuple[str, ...]:
    return tuple(Candidate(1, 1, 1, 1, 1, 1, 1, Recompute("none"))._values())


_OURS = dict.fromkeys(
    ("sequence_parallel", "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"), True
)
"""The arguments that candidates set whatever the user gives; they keep the user's ``global_batch_size``."""


def with_search_defaults(job: RequestedJob) -> RequestedJob:
    """Return ``job`` with the best values that a candidate can have, for the rules about flags.

    Where nobody gives the sizes of a pipeline or of experts, there are candidates that go with either.
    """
    sizes: dict[str, object] = (
        {"pipeline_model_parallel_size": 2} if job.parallel.pipeline_model_parallel_size == 1 else {}
    )
    if not job.parallel.expert_tensor_parallel_size:
        sizes["expert_tensor_parallel_size"] = 1
    return job.with_arguments(**_OURS, **sizes)


def alone(job: RequestedJob) -> RequestedJob:
    """Return ``job`` with a search's defaults, but without a pipeline and the flags set for one."""
    return with_search_defaults(job).with_arguments(
        pipeline_model_parallel_size=1,
        expert_model_parallel_size=2,
        pipeline_schedule=None,
        num_virtual_stages_per_pipeline_rank=None,
        pipeline_memory_limit=None,
        **dict.fromkeys([*options.permitted(job), *arguments()]),
    )


def fixed_arguments(words: Sequence[str]) -> frozenset[str]:
    """Return the arguments that ``words``, a command line, give and a search leaves as they are."""
    arguments = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words}
    if "recompute_activations" in arguments:
        arguments.add("recompute_granularity")
    return frozenset(arguments & set(_candidate_arguments()) - {*_OURS, "global_batch_size"})


def strip(words: Sequence[str], more: Sequence[str] = ()) -> list[str]:
    """Return ``words``, a command line, without the flags that a candidate sets and their values.

    ``more`` are arguments that not every candidate sets.
    """
    flags = {flag(name) for name in (*_candidate_arguments(), "recompute_activations", *more)}
    remaining: list[str] = []
    is_dropping = False
    for word in words:
        if word.startswith("--"):
            is_dropping = word.partition("=")[0] in flags
        if not is_dropping:
            remaining.append(word)
    return remaining
