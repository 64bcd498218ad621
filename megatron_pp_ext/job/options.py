"""How features read their flags and arguments: what ``job.pipeline`` and ``job.call`` ask."""

from collections.abc import Mapping
from typing import Any

from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.features import FEATURES
from megatron_pp_ext.features.feature import Argument, ReadRequest, Rows
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule.entry import AUTO


def arguments() -> Mapping[str, Argument]:
    """Return the arguments of ``install`` that are features', by their names."""
    return {argument.name: argument for feature in FEATURES for argument in feature.arguments()}


def read(job: RequestedJob, request: Request) -> Request:
    """Return ``request`` with what the flags of all features ask for."""
    for feature in FEATURES:
        request = feature.read(job, request)
    return request


def as_flags(request: Request) -> dict[str, Any]:
    """Return the flags of features that would request the same, by the names of their arguments."""
    return {name: value for feature in FEATURES for name, value in feature.as_flags(request).items()}


def permitted(job: RequestedJob) -> dict[str, Any]:
    """Return the flags of features as the other flags permit them, by the names of their arguments."""
    return {name: value for feature in FEATURES for name, value in feature.permitted(job).items()}


def left_open(job: Job) -> tuple[str, ...]:
    """Return the arguments of features whose values a search for ``job`` chooses."""
    names = (name for feature in FEATURES for name in feature.left_open)
    return tuple(name for name in names if job.value(name) == AUTO)


def chosen(job: RequestedJob, read: ReadRequest, rows: Rows, memory: float | None = None) -> dict[str, Any]:
    """Return all flags that ``job`` leaves open, by the names of their arguments, with the chosen values.

    A feature sees what those before it chose.  ``memory`` are the bytes of a device, where they are known.
    ValueError, in one line, where one has no possible value.
    """
    values: dict[str, Any] = {}
    for feature in FEATURES:
        values |= feature.chosen(job.with_arguments(**values), read, rows, memory)
    return values
