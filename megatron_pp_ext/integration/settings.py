"""The settings of a training run, besides its schedule, that hooks and runners need.

Whoever requests a pipeline fills it in.  Megatron's own trainer does so from its arguments
(``trainer.run_settings``); the defaults are for a training loop that sets nothing itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs

PIPELINE = "pp"
"""The name of pipeline groups in Megatron's flags and files; their settings hold for ours too."""


class Saving(Protocol):
    """The part of a pipeline's makespan that another layout saves, by simulation."""

    @property
    def before(self) -> float:
        """The seconds with the layout of today."""

    @property
    def makespan(self) -> float:
        """The seconds with the other layout."""

    @property
    def gain(self) -> float:
        """The part of ``before`` that is saved."""


type Advice = Callable[[Costs, Schedule, str, float], tuple[str, Saving] | None]
"""(costs, schedule, its name, free bytes) -> a shorter layout for the next start, if there is one.

ValueError for a model that cannot be estimated.
"""

type CostsAt = Callable[[int, bool, int, int], Costs]
"""(stages, whether they leave out a split head, tokens of a sequence, sequences of a microbatch) -> costs.

ValueError for a model that cannot be estimated.
"""


def costs_at(estimate: Callable[[RequestedJob, int, bool], Costs], asked: RequestedJob) -> CostsAt:
    """Return the costs of ``asked`` at other lengths, by ``estimate(asked, stages, splits_head)``."""
    # Megatron goes on to complete the arguments, and costs would not know what it adds.
    asked = asked.changed()

    def costs(stages: int, splits_head: bool, length: int, sequences: int) -> Costs:
        return estimate(asked.changed(seq_length=length, micro_batch_size=sequences), stages, splits_head)

    return costs


@dataclass(frozen=True, slots=True, eq=False)
class Settings:
    """A training run, as far as the pipeline has to know it.

    A value that is known only later, such as the step that a run resumes from, is a function.
    """

    timeout: timedelta = timedelta(minutes=10)
    """How long a message may take before its job ends; the default is Megatron's own."""
    communicators: Path | None = None
    """A YAML file of settings of NCCL's groups, as Megatron reads it; messages take those of ``pp``."""
    has_priority: bool = False
    """Whether messages have streams of a high priority whatever that file has."""
    clip_grad: float = 0.0
    """The gradient norm that updates are clipped to; 0 where they are not."""
    train_steps: Callable[[], int] | None = None
    """Returns the training steps of the whole run, which a pipeline that never flushes has to know."""
    steps_done: Callable[[int], int] = lambda counted: counted
    """Returns the training steps before the one that runs, of which the runner has counted some itself."""
    message_bytes: Callable[[], float] = lambda: 0.0
    """Returns the bytes of a message, for schedules that are compiled from measurements."""
    advice: Advice | None = None
    """Looks for a better layout after the steps that were measured; None where nobody wants one."""
    costs_at: CostsAt | None = None
    """Returns the costs of the model's stages at another sequence length; None where nobody knows them."""
    caveat: Callable[[], str] = lambda: ""
    """Returns a line about differences from a run under 1F1B; logged once, before the first step."""
