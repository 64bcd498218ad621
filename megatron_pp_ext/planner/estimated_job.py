"""A job with the estimate of its step: all that ``mpp estimate`` prints and a notebook shows of it."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.costs import system as systems
from megatron_pp_ext.costs.system import System
from megatron_pp_ext.job import options
from megatron_pp_ext.job.flag_effects import caution, not_counted
from megatron_pp_ext.job.flag_table import by_name
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.sizes import data_parallel_size, fewest_ranks, smallest_world
from megatron_pp_ext.jobs.command import missing
from megatron_pp_ext.planner import described
from megatron_pp_ext.planner.layout import requested_layout
from megatron_pp_ext.planner.search.launch_lines import Launch, about_placeholders
from megatron_pp_ext.planner.step.comparison import Comparison, compared
from megatron_pp_ext.planner.step.error_band import above
from megatron_pp_ext.planner.step.estimate import MARGIN, Estimate, estimate_request
from megatron_pp_ext.planner.step.model_description import entries
from megatron_pp_ext.planner.step.workload import additions


@dataclass(frozen=True, slots=True)
class PlacedJob:
    """A ``job`` on ``gpus`` devices of ``system``, with ``request``, its pipeline, and ``words``, its flags.

    Choices that its flags left open are made.  ``about_gpus`` and ``about_layout`` are words about those of
    the number of devices and of the layout.
    """

    job: RequestedJob
    words: Sequence[str]
    request: Request
    system: System
    gpus: int
    about_gpus: str = ""
    about_layout: str = ""

    @classmethod
    def of(
        cls, job: RequestedJob, words: Sequence[str], system: System, gpus: int | None = None
    ) -> "PlacedJob":
        """Return the job of the flags ``words``, by default on the fewest GPUs that hold it.

        ValueError for a job that cannot be, and for one whose step is too large to be simulated here.
        """
        job = job.with_arguments(micro_batch_size=job.batch.micro_batch_size or 1)
        about_gpus = ""
        if gpus is None:
            gpus = smallest_world(job)
            if gpus > fewest_ranks(job):
                about_gpus = (
                    f"on {gpus} GPUs, the fewest that share experts {job.parallel.expert_ranks} ways: "
                    "--world-size, or gpus from Python, sets another number"
                )
        words, job, about_layout = _with_layout(words, job, gpus)
        words, job = _with_choices(words, job, gpus, system.memory_bytes)
        request = for_world(job, gpus)
        request.require_few_actions()
        return cls(job, words, request, system, gpus, about_gpus, about_layout)

    @property
    def placeholders(self) -> list[str]:
        """Flags that training needs and the job lacks, to be replaced by the user's own."""
        return missing(self.words)

    @property
    def launch(self) -> Launch:
        """The command that trains the job."""
        return Launch([*self.words, *self.placeholders], self.gpus, self.system.gpus_per_node)

    def estimated(self, margin: float = MARGIN) -> "EstimatedJob":
        """Return the job with its estimate and, for comparison, with those of Megatron's own schedules.

        ValueError for a job that cannot be estimated, and for a step that no machine could take.
        """
        step = estimate_request(self.job, self.system, self.request, margin)
        step.require_possible(self.system)
        comparison = compared(self.job, self.system, self.request.data, step, margin)
        return EstimatedJob(self, step, comparison)


@dataclass(frozen=True, slots=True, repr=False)
class EstimatedJob:
    """The job ``placed`` with the estimate of its ``step``, next to those of Megatron's own schedules.

    ``notes`` are sentences about the job as it was described.
    """

    placed: PlacedJob
    step: Estimate
    comparison: Comparison | None
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        placed = self.placed
        about = f"{placed.request.schedule} on {placed.gpus} x {placed.system.name}"
        return f"<Estimate of {about}: {self.step.summary}>"

    @property
    def sizes(self) -> list[str]:
        """What was assumed about the sizes of the job, and the model's parameters, in sentences."""
        job, lines = self.placed.job, [*filter(None, [self.placed.about_gpus])]
        if not job.batch.sizes:
            lines.append(
                "no --global-batch-size: a step of one microbatch for each data-parallel rank is estimated, "
                "as Megatron would train"
            )
        if counted := entries(job):
            whole, active = (counted[name] / 1e9 for name in ("parameters", "active_parameters"))
            lines.append(
                f"{whole:.4g}B parameters in {job.precision.words}, of which a token uses {active:.4g}B"
            )
        return lines

    @property
    def title(self) -> str:
        """The schedule, the devices and the microbatches."""
        request = self.placed.request
        replicas = request.updates.replicas if request.updates else None
        copies = f"{request.data} data-parallel"
        if replicas is not None and not replicas.is_straight:
            copies = f"{replicas} replicas of the stages"
        devices = f"{self.placed.gpus} x {self.placed.system.name}"
        return f"{request.schedule} on {devices}, {copies}, {request.microbatches} microbatches"

    @property
    def times(self) -> list[str]:
        """The seconds of the step, how sure they are, and what people should know of the schedule."""
        step, request = self.step, self.placed.request
        tokens = step.tokens_per_second / self.placed.gpus
        expected = ""
        if step.band is not None and (around := step.band.of(step.step_seconds)) is not None:
            least, most = around
            expected = f"expect {least:.4g} to {most:.4g} s: "
        lines = [
            f"step {step.step_seconds:.4g} s: pipeline {step.pipeline_seconds:.4g} s, reductions and "
            f"update {step.other_seconds:.4g} s",
            f"MFU {step.mfu}, bubble {step.bubble:.1%}, {tokens:,.0f} tokens/s a GPU",
            f"{expected}{step.grounds}",
            *filter(None, (step.note, *(option.about for option in request.options))),
        ]
        if request.updates is None and request.ranks > 1 and request.microbatches < request.ranks:
            lines.append(
                f"{request.ranks} pipeline ranks share {request.microbatches} microbatches: raise "
                "--global-batch-size"
            )
        return lines

    @property
    def memory(self) -> Mapping[str, Sequence[float]]:
        """The bytes of each rank by what they are for, as far as any rank has such bytes."""
        ranks = self.step.ranks
        rows = {name: [getattr(rank, name) for rank in ranks] for name, _ in self.step.fullest.components()}
        return {name: row for name, row in rows.items() if any(row)}

    @property
    def device_bytes(self) -> float:
        """The memory of a device."""
        return self.placed.system.memory_bytes

    @property
    def memory_table(self) -> dict[str, list[str]]:
        """The gigabytes of each rank, in words, by what they are for, and their sum."""
        total = [rank.total for rank in self.step.ranks]
        rows = {**self.memory, "total": total}
        return {name: [f"{size / 1e9:.2f}" for size in row] for name, row in rows.items()}

    @property
    def about_memory(self) -> list[str]:
        """What people should know of the ranks' memory."""
        return list(self._about_memory())

    def _about_memory(self) -> Iterator[str]:
        step = self.step
        if any(step.waiting_bytes):
            most = max(step.waiting_bytes)
            gathers = f", which gather operands in {step.gather_bytes / 1e9:.2f} GB of the buffers"
            yield (
                f"up to {most / 1e9:.2f} GB of activations on rank {step.waiting_bytes.index(most)} wait for "
                f"weight gradients{gathers if step.gather_bytes else ''}"
            )
        for addition in additions():
            yield from addition.lines(step)
        fullest, more = step.fullest, above(self.placed.job)
        yield (
            f"measured peaks were up to {more:.0%} above their estimates: up to "
            f"{(1 + more) * fullest.total / 1e9:.1f} GB on the fullest rank"
        )
        if fullest.total > self.device_bytes:
            name, size = max(fullest.components(), key=lambda pair: pair[1])
            yield (
                f"does not fit: rank {step.ranks.index(fullest)} needs {fullest.total / 1e9:.1f} GB of "
                f"{self.device_bytes / 1e9:.0f} GB, {size / 1e9:.1f} GB of it {name}"
            )

    @property
    def alternatives(self) -> list[tuple[str, str, str]]:
        """The job's step, and then others to compare it with: name, seconds and gigabytes, in words."""
        return [step.words for step in self.comparison.steps] if self.comparison else []

    @property
    def warnings(self) -> list[str]:
        """What is predicted to be better, and what the estimate leaves out."""
        better = self.comparison.warnings if self.comparison else []
        return [*better, *caution(not_counted(self.placed.job))]

    @property
    def command(self) -> str:
        """The command that trains the job, for a shell."""
        return self.placed.launch.text

    @property
    def about_command(self) -> list[str]:
        """What was chosen in the command, and which of its flags are to be replaced."""
        return [*filter(None, (self.placed.about_layout, about_placeholders(self.placed.placeholders)))]


def estimate(
    flags: str | Sequence[str] = (),
    model: str | None = None,
    gpus: int | None = None,
    system: str = "h100",
    margin: float = MARGIN,
) -> EstimatedJob:
    """Return the estimate of a training step: seconds, and the memory of every rank.

    ``flags`` are Megatron's and those of this package, as a line or as words.  ``model`` is a name of ``mpp
    models``, a Hugging Face config.json or its folder, or a JSON of Megatron's names; ``flags`` add to it and
    replace its own.  ``gpus`` are by default the fewest that hold the job, and ``system`` is as for ``mpp
    estimate``.  ``margin`` is what allocators leave unused, a fraction of what comes and goes.

    ValueError, in one line with a fix, for what Megatron, a schedule or the estimate cannot take.
    """
    if gpus is not None and gpus < 1:
        raise ValueError(f"gpus is {gpus}, but must be 1 or more: raise it")
    words = shlex.split(flags) if isinstance(flags, str) else list(flags)
    description = described.read(words, model)
    job = description.counted()
    if not job.model.vocab_size:
        job = job.with_arguments(vocab_size=described.size(job))
    estimated = PlacedJob.of(job, description.words, systems.read(system), gpus).estimated(margin)
    notes = [*description.notes, *([] if job.precision.is_half else [described.FULL_PRECISION])]
    return replace(estimated, notes=tuple(notes))


def _with_layout(words: Sequence[str], job: RequestedJob, gpus: int) -> tuple[list[str], RequestedJob, str]:
    """Return flags with a layout in the place of ``auto``, what they ask, and words about the layout."""
    if not job.pipeline.finds_layout:
        return list(words), job, ""
    job, chosen = requested_layout.resolve(job, data_parallel_size(job, gpus), job.model.vocab_size)
    flag, replaced = "--pipeline-model-parallel-layout", "--num-virtual-stages-per-pipeline-rank"
    rest = [
        word for name, values in by_name(words) if name not in (flag, replaced) for word in (name, *values)
    ]
    return [*rest, flag, str(job.pipeline.pipeline_model_parallel_layout)], job, chosen


def _with_choices(
    words: Sequence[str], job: RequestedJob, gpus: int, memory: float
) -> tuple[list[str], RequestedJob]:
    """Return flags with what features choose where these leave it open, and what they ask then.

    ``memory`` are the bytes of a GPU.
    """
    choices = options.chosen(
        job, lambda changed: for_world(changed, gpus), lambda: job.padded_vocabulary, memory
    )
    flags = {"--" + name.replace("_", "-"): str(value) for name, value in choices.items()}
    rest = [word for name, values in by_name(words) if name not in flags for word in (name, *values)]
    return [*rest, *chain.from_iterable(flags.items())], job.with_arguments(**choices)
