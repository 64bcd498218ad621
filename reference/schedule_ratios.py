"""Published steps of one job under several schedules, from ``schedule_ratios.json``, which has their sources.

Rows of one ``job`` differ in the schedule alone, so that ratios of their times can be compared with those of
estimates, whatever the machine.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("schedule_ratios.json")


@dataclass(frozen=True, slots=True)
class PublishedStep:
    """A row of ``table``: a step of ``microbatches`` of ``samples`` sequences under ``schedule``.

    ``value`` is as printed, in the unit ``metric``.  ``setting`` is what else sets the row apart from others
    of its table: vocabulary, recomputation, the slow link.
    """

    table: str
    model: str
    ranks: int
    tensor: int
    microbatches: int
    samples: int
    length: int
    schedule: str
    metric: str
    value: float
    setting: Mapping[str, Any] = field(hash=False)

    @property
    def job(self) -> tuple[object, ...]:
        """All but the schedule; half as many samples in twice as many microbatches are the same job."""
        batch = self.microbatches * self.samples
        return self.table, self.model, self.ranks, batch, self.length, *self.setting.values()

    @property
    def seconds(self) -> float:
        """The seconds of a step; where only the MFU is printed, a number in proportion to them."""
        match self.metric:
            case "samples_s_gpu":
                return self.microbatches * self.samples / (self.value * self.ranks * self.tensor)
            case "s_microbatch":
                return self.microbatches * self.value
            case "mfu":
                return 1 / self.value
        raise ValueError(f"{self.metric} is no time")


@dataclass(frozen=True, slots=True)
class Profile:
    """Profiled seconds of F, I and W of a stage, and of a message, for microbatches of ``samples``."""

    forward: float
    input_gradient: float
    weight_gradient: float
    hop: float
    samples: int


@cache
def _content() -> Any:
    return json.loads(_FILE.read_text(encoding="utf-8"))


def _rows(group: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for values in group["rows"]:
        yield {**group["all"], **dict(zip(group["columns"], values, strict=True))}


def models() -> Mapping[str, Mapping[str, int]]:
    """Return the sizes of each model by its name."""
    sizes: Mapping[str, Mapping[str, int]] = _content()["models"]
    return sizes


@cache
def profiles() -> Mapping[tuple[str, int], Profile]:
    """Return the profiles by model and number of microbatches."""
    (group,) = (group for group in _content()["groups"] if group["id"] == "zero-bubble-9")
    return {
        (row["model"], row["m"]): Profile(*(1e-3 * row[name] for name in ("F", "I", "W", "hop")), row["b"])
        for row in _rows(group)
    }


_OF_A_STEP = {"model", "p", "t", "m", "b", "seq", "schedule", "metric", "value", "gb", "forward_ms"}


@cache
def steps(table: str) -> tuple[PublishedStep, ...]:
    """Return the rows of ``table``, such as ``zero-bubble-4``."""
    (group,) = (group for group in _content()["groups"] if group["id"] == table)
    return tuple(
        PublishedStep(
            table,
            row.get("model", ""),
            row["p"],
            row.get("t", 1),
            row["m"],
            row.get("b", 1),
            row.get("seq", 0),
            row["schedule"],
            row["metric"],
            row["value"],
            {name: value for name, value in row.items() if name not in _OF_A_STEP},
        )
        for row in _rows(group)
    )


def tables() -> tuple[str, ...]:
    """Return the names of all tables, but for that of profiles."""
    return tuple(group["id"] for group in _content()["groups"] if group["id"] != "zero-bubble-9")


def source(table: str) -> str:
    """Return where ``table`` was published."""
    return next(group["source"] for group in _content()["groups"] if group["id"] == table)
