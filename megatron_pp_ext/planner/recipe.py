"""A recipe of Megatron-Bridge: a function without arguments that returns the configuration of a job."""

import importlib.util
import inspect
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.costs import system
from megatron_pp_ext.job import flag_table, layers, model_config, options
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.json_input import did_you_mean
from megatron_pp_ext.planner.hugging_face.config_json import GivenModel
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.setting_error import failed_check

_IN_NAME = re.compile(r"_(\d+)gpu_(\w+?)_")
"""Matches the GPUs in the name of a recipe, such as llama3_70b_pretrain_64gpu_h100_bf16_config."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The job of a recipe, for ``gpus`` GPUs of the kind ``device``; None where its name has none.

    ``arguments`` are Megatron's, without those that have their defaults.  ``notes`` are sentences on what
    they leave out.
    """

    name: str
    gpus: int | None
    device: str | None
    arguments: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def system(self) -> str | None:
        """The system that has the rates of its GPUs; None where none is shipped."""
        return self.device if self.device in system.shipped() else None

    def model(self, flags: Sequence[str] = ()) -> GivenModel:
        """Return the job as a planner's command takes it with ``flags``.

        The recipe's own stages are left out where these have others, or name a schedule that takes another
        number of chunks a rank.
        """
        words = flag_table.by_argument(flags)
        cut = [name for name in _STAGES if name in self.arguments]
        if not cut or (self._fits(words) and not words.keys() & set(_STAGES)):
            return GivenModel(self.name, self.arguments, notes=list(self.notes))
        values = {name: value for name, value in self.arguments.items() if name not in cut}
        note = f"its own stages are left out ({' '.join(flag_table.spelled(self._only(cut)))})"
        return GivenModel(self.name, values, notes=[*self.notes, note])

    def _fits(self, words: Mapping[str, Sequence[str]]) -> bool:
        """Whether the schedule of ``words``, if there is one, takes the recipe's chunks a rank."""
        name = catalog.canonical(" ".join(words.get("pipeline_schedule", ())))
        entry = catalog.ENTRIES.get(name)
        args, _ = flag_table.parse([], self._only([*_STAGES, "pipeline_model_parallel_size", *_COUNTED]))
        return entry is None or entry.accepts(layers.chunks_requested(Job.of(args)) or 1)

    def _only(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: self.arguments[name] for name in names if name in self.arguments}


_STAGES = [
    flag_table.name_of(flag) for flag in (*layers.CHUNKS, *layers.SPREAD, "--pipeline-model-parallel-layout")
]
"""The arguments that cut a model into stages."""

_COUNTED = "num_layers", "hybrid_layer_pattern", "mtp_num_layers"
"""The arguments that say what is cut."""


def read(name: str, gpus: int | None = None) -> Recipe:
    """Return the recipe ``name``, MODULE:FUNCTION, on ``gpus`` GPUs in place of those in its name.

    ValueError, in one line, where there is no such function, where it fails, and where what it returns is
    no job with a pipeline.
    """
    function = _function(name)
    try:
        container = function()
    except Exception as error:
        raise ValueError(f"--recipe {name} fails: {_line(error)}") from error
    return of_container(name, container, gpus)


def of_container(name: str, container: Any, gpus: int | None = None) -> Recipe:
    """Return the recipe ``name`` from the ``container`` that its function returned.

    ValueError as for ``read``.
    """
    match = _IN_NAME.search(name.rpartition(":")[2])
    device = match[2] if match else None
    gpus = gpus or (int(match[1]) if match else None)
    try:
        model = container.model
        ranks = model.pipeline_model_parallel_size
        whole = ranks * model.tensor_model_parallel_size * model.context_parallel_size
    except AttributeError as error:
        raise ValueError(
            f"--recipe {name} returns {type(container).__name__} without {error.name}: name a function that "
            "returns a ConfigContainer with a language model"
        ) from error
    if ranks < 2:
        raise ValueError(
            f"--recipe {name} has no pipeline, but pipeline_model_parallel_size {ranks}: choose another, or "
            "estimate its model by --model and flags"
        )
    try:
        args = model_config.of_container(container, max(1, (gpus or whole) // whole))
    except Exception as error:
        raise ValueError(f"--recipe {name}: Megatron-Bridge cannot start it: {_line(error)}") from error
    return Recipe(name, gpus, device, dict(_changed(args)), tuple(_notes(container)))


def _changed(args: Namespace) -> Iterator[tuple[str, Any]]:
    """Yield the arguments that have another value than by default, as their flags would give them."""
    for action in {action.dest: action for action in flag_table.parser()._actions}.values():
        value, is_list = _plain(getattr(args, action.dest, None)), action.nargs in ("+", "*")
        if is_list and value is not None and not isinstance(value, list):
            value = [value]
        elif isinstance(value, list) and not is_list and action.type is not flag_table.pattern:
            value = ",".join(map(str, value))
        elif action.type is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None and value != action.default:
            yield action.dest, value


@dataclass(frozen=True, slots=True)
class Call:
    """What starts the ``job`` of a recipe under the schedule of ``request``, in the recipe's own script."""

    job: RequestedJob
    request: Request

    @property
    def lines(self) -> list[str]:
        """The call, and after it the settings of the config that go with it."""
        if self.job.pipeline.pipeline_schedule is None:
            return ["it has Megatron's own schedule: name another by --pipeline-schedule after --"]
        return [self.text, *(f"config.model.{name} = {value!r}" for name, value in self.settings.items())]

    @property
    def text(self) -> str:
        """The call of ``install``."""
        values: dict[str, Any] = {"ranks": self.request.ranks, "microbatches": self.request.microbatches}
        if catalog.abilities(self.request.schedule).takes_limit:
            values["memory_limit"] = self.job.pipeline.pipeline_memory_limit
        if not self.request.finest.turns_round and (chunks := self.request.finest.chunks) > 1:
            values["chunks"] = chunks
        for name in options.arguments():
            if (value := self.job.argument(f"pipeline_{name}")) is not None:
                values[name] = value
        if self.job.precision.cuda_graph_impl != "none":
            values["unproved"] = True
        words = [repr(self.request.schedule), *(f"{name}={value!r}" for name, value in values.items())]
        return f"megatron_pp_ext.install({', '.join(words)})"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the model's config by name."""
        chunks = self.request.finest.chunks
        return {
            "virtual_pipeline_model_parallel_size": None if chunks == 1 else chunks,
            "pipeline_model_parallel_layout": self.job.pipeline.pipeline_model_parallel_layout,
        }

    def record(self) -> dict[str, Any]:
        """Return it for a JSON file."""
        return (
            {"call": self.text, "settings": self.settings}
            if self.job.pipeline.has_schedule
            else {"call": None}
        )


def _function(name: str) -> Callable[[], Any]:
    """Return the function ``name``, MODULE:FUNCTION; ValueError unless it can be called without arguments."""
    place, separator, attribute = name.partition(":")
    if not (place and separator and attribute):
        raise ValueError(f"--recipe is {name}: give MODULE:FUNCTION")
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        missing = str(error.name)
        if missing == "megatron" or (missing.startswith("megatron.bridge") and not _has_bridge()):
            raise ValueError(f"--recipe {name} needs Megatron-Bridge: pip install megatron-bridge") from error
        if place == missing or place.startswith(f"{missing}."):
            raise ValueError(f"--recipe {name}: there is no module {missing}: correct it") from error
        raise ValueError(f"--recipe {name} needs the package {missing}: install it") from error
    except Exception as error:
        raise ValueError(f"--recipe {name}: its module cannot be imported: {_line(error)}") from error
    functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
    if attribute not in functions:
        hint = did_you_mean(attribute, functions, "see its functions that end in _config")
        raise ValueError(f"--recipe {name}: {place} has no function {attribute}: {hint}")
    function: Callable[[], Any] = vars(module)[attribute]
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    needed = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty and parameter.kind not in kinds
    ]
    if needed:
        raise ValueError(
            f"--recipe {name} needs arguments ({', '.join(needed)}): write a function without any that calls "
            "it, and name that"
        )
    return function


def _has_bridge() -> bool:
    try:
        return importlib.util.find_spec("megatron.bridge") is not None
    except ImportError:
        return False


def _line(error: Exception) -> str:
    return failed_check(error) or type(error).__name__


def _notes(container: Any) -> list[str]:
    notes = []
    if getattr(container, "peft", None) is not None:
        notes.append("it trains adapters alone, and is estimated as if it trained all weights")
    if hasattr(container.model, "vision_config"):
        notes.append("its image encoder is not counted")
    dataset = getattr(container, "dataset", None)
    if getattr(dataset, "enable_offline_packing", False) or getattr(
        dataset, "enable_in_batch_packing", False
    ):
        notes.append("its sequences are packed, and attention is counted as if each were one document")
    return notes


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON has it; None for an object that no flag can give."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(member) for member in value]
    return value if isinstance(value, bool | int | float | str) else None
