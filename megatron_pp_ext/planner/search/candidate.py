"""One way to run a model on so many GPUs, and how it is said in Megatron's flags."""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_pp_ext.planner.step.programs import NO_PIPELINE, placement_of
from megatron_pp_ext.schedule.placement import Placement


@dataclass(frozen=True, slots=True)
class Recompute:
    """What a backward computes again, in the values of Megatron's recompute flags."""

    name: str
    granularity: str | None = None
    method: str | None = None
    layers: int | None = None
    modules: tuple[str, ...] = ()

    def values(self) -> dict[str, Any]:
        """The arguments it sets."""
        return {
            "recompute_granularity": self.granularity,
            "recompute_method": self.method,
            "recompute_num_layers": self.layers,
            "recompute_modules": list(self.modules) or None,
        }


@dataclass(frozen=True, slots=True)
class Candidate:
    """Sizes of every kind of parallelism, the microbatch, what is recomputed, and the schedule.

    ``limit`` is that of ``flex``, as ``--pipeline-memory-limit`` takes it.
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
    limit: float | None = None

    @property
    def name(self) -> str:
        """Short, and fit for a file's name: what differs from one rank and no recomputation."""
        sizes = (("tp", self.tensor), ("cp", self.context), ("ep", self.expert), ("pp", self.pipeline))
        words = [f"{letters}{size}" for letters, size in sizes if size > 1]
        words += [f"dp{self.data}", f"mb{self.micro_batch}"]
        if self.pipeline > 1:
            words.append(self.schedule if self.chunks < 3 else f"{self.schedule}{self.chunks}")
        if self.recompute.granularity:
            words.append(self.recompute.name)
        return "-".join(words)

    @property
    def placement(self) -> Placement:
        """Where its stages live; those of ``flex`` may be placed otherwise once it is compiled."""
        name = "v-half" if self.schedule == "flex" else self.schedule
        return placement_of(name, self.pipeline, self.chunks)

    def described(self, args: Namespace) -> Namespace:
        """``args`` with everything set as here."""
        return Namespace(**{**vars(args), **self._values()})

    def flags(self) -> list[str]:
        """The same on a command line."""
        return list(spelled(self._values()))

    def _values(self) -> dict[str, Any]:
        is_loop = self.chunks > 1 and self.schedule in ("interleaved", "interleaved-zb", "breadth-first")
        return {
            "tensor_model_parallel_size": self.tensor,
            "sequence_parallel": self.tensor > 1,
            "context_parallel_size": self.context,
            "expert_model_parallel_size": self.expert,
            "pipeline_model_parallel_size": self.pipeline,
            "num_virtual_stages_per_pipeline_rank": self.chunks if is_loop else None,
            "pipeline_schedule": self.schedule if self.pipeline > 1 else None,
            "pipeline_memory_limit": self.limit,
            "micro_batch_size": self.micro_batch,
            "global_batch_size": self.micro_batch * self.data * self.microbatches,
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            **self.recompute.values(),
        }


SETTLED = tuple(Candidate(1, 1, 1, 1, 1, 1, 1, Recompute("none"))._values())
"""The arguments that a candidate sets."""


_OURS = ("sequence_parallel", "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
"""What a candidate sets whatever the user says; ``global_batch_size`` is the user's anyway."""


def settled_in(words: Sequence[str]) -> frozenset[str]:
    """The arguments that ``words``, a command line, settles and a search is to leave as they are."""
    given = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words}
    if "recompute_activations" in given:
        given.add("recompute_granularity")
    return frozenset(given & set(SETTLED) - {*_OURS, "global_batch_size"})


def strip(words: Sequence[str]) -> list[str]:
    """``words``, a command line, without the flags that a candidate sets and their values."""
    settled = {"--" + name.replace("_", "-") for name in (*SETTLED, "recompute_activations")}
    kept: list[str] = []
    is_dropping = False
    for word in words:
        if word.startswith("--"):
            is_dropping = word.partition("=")[0] in settled
        if not is_dropping:
            kept.append(word)
    return kept


_OFF = {"add_bias_linear": "--disable-bias-linear"}
"""Flags that turn off what is on without them."""

_ELSEWISE = {"fp8": "--fp8-format"}
"""Flags that are not called as their argument is."""


def spelled(values: dict[str, Any]) -> Iterator[str]:
    """Arguments as words of a command line: what is None, or off without a flag, is left out."""
    for name, value in values.items():
        if value is False and name in _OFF:
            yield _OFF[name]
        if value is None or value is False or (value is True and name in _OFF):
            continue
        yield _ELSEWISE.get(name, "--" + name.replace("_", "-"))
        if isinstance(value, list):
            yield from map(str, value)
        elif value is not True:
            yield str(value)
