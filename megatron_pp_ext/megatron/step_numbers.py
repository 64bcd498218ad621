"""The names of a training step's measured numbers, and their fields in the line of a log."""

from collections.abc import Callable, Mapping

from megatron_pp_ext.megatron.requested import LastStep, Pipeline

BUBBLE, PEAK, PEAK_TO_PLAN, STEP_TO_PLAN, MFU = (
    "pipeline/bubble",
    "pipeline/peak-activations-bytes",
    "pipeline/peak-vs-plan",
    "pipeline/step-vs-plan",
    "pipeline/mfu",
)
"""The names of a step's numbers; only a trainer that counts the model's operations has the last."""

MEASURED, RATES = "measured", "rates"
"""What a plan's seconds follow from where no user gave them: steps of this run, or rates of its device."""


class LogLine:
    """The numbers of the iteration that a trainer logs now: the last step's, of the pipeline ``name``.

    Making it measures them, which is collective.
    """

    def __init__(self, name: str, last_step: LastStep) -> None:
        self._name = name
        self.numbers = last_step.numbers()
        by = f" ({last_step.plan_by})" if last_step.plan_by else ""
        self._texts: Mapping[str, Callable[[float], str]] = {
            BUBBLE: lambda part: f"bubble: {part:.3f}",
            PEAK: lambda size: f"peak activations (MB): {size / 1e6:.4g}",
            PEAK_TO_PLAN: lambda ratio: f"peak / plan: {ratio:.3f}",
            STEP_TO_PLAN: lambda ratio: f"step / plan{by}: {ratio:.3f}",
            MFU: lambda part: f"MFU: {part:.3f}",
        }

    @property
    def text(self) -> str:
        """The fields as Megatron writes its own."""
        fields = (self._texts[name](number) for name, number in self.numbers.items())
        return "".join(f" {field} |" for field in (f"pipeline: {self._name}", *fields))


_line: LogLine | None = None


def measured_while_logging[Result](
    pipeline: Pipeline, log: Callable[[], Result]
) -> tuple[Result, dict[str, float]]:
    """Call ``log``, whose line ends with the fields of the last step; return its result and the numbers.

    There are none where no step was timed.  Collective over the pipeline.
    """
    global _line
    line = LogLine(pipeline.name, pipeline.last_step)
    if not line.numbers:
        return log(), {}
    _line = line
    try:
        return log(), line.numbers
    finally:
        _line = None


def line_in_progress() -> LogLine | None:
    """Return the line of the iteration that a trainer logs now; None while it logs none."""
    return _line


def completed(message: str) -> str:
    """Return the line ``message`` of a trainer, with the fields of the iteration that it logs now."""
    return message if _line is None else f"{message}{_line.text}"
