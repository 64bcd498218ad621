"""Asks the installed Megatron whether it starts a job: the command line goes to its own parser and checks.

Megatron takes seconds to import, and a command is to be done in one.  So a process of its own
(``megatron.trainer.acceptance``) imports it while the command goes on, and its answers are stored: by the
job, and by the files of Megatron that answer, which a checkout may change.
"""

import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from megatron_pp_ext.compiler.cache import directory, key
from megatron_pp_ext.compiler.request import Request
from megatron_pp_ext.files import read_text, write_whole
from megatron_pp_ext.job import flag_table, layers, sizes
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.startup_file import CACHE, PREFIX
from megatron_pp_ext.version import VERSION

_SECONDS = 120
"""How long a command waits for an answer: importing from a slow disk may take a minute."""

_ANSWERS = "core", "core/transformer", "training"
"""The folders below ``megatron`` whose files decide on an answer."""


@dataclass(frozen=True, slots=True)
class Question:
    """A job as Megatron sees it: its ``flags``, the number of ranks, and variables of the environment.

    The checks of the model's config see the arguments ``shown``, not those of the flags.
    """

    flags: tuple[str, ...]
    world_size: int
    variables: Mapping[str, str] = field(default_factory=dict)
    shown: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """Return the question as JSON, in one line."""
        return json.dumps(asdict(self))


def question(
    words: Sequence[str], job: RequestedJob, request: Request, gpus: int, variables: Mapping[str, str]
) -> Question:
    """Return the question about ``words``, the command line of ``job`` on ``gpus`` GPUs.

    What the hooks of this package let Megatron see under the schedule of ``request`` stands in it: the chunks
    that a schedule needs, one replica of each stage (``trainer.placed_data``), and pairs that are no
    concern of Megatron's own schedule (``features.pairs.megatron``).
    """
    ours, flags, shown = {*flag_table.flags()}, [], {}
    if job.pipeline.has_schedule and not request.is_stock:
        chunks, parallel = request.finest.chunks, job.parallel
        has_flag = layers.chunks_requested(job) is not None and not request.is_compiled
        if layers.stages_described(job) is None and not has_flag:
            ours |= {*layers.CHUNKS}
            flags = [_CHUNKS, str(chunks)] if chunks > 1 else []
        if sizes.requested_replicas(job):
            gpus = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
        if parallel.overlap_moe_expert_parallel_comm:
            shown = dict(_shown_of_pairs(job, chunks))
    return Question((*_without(words, ours), *flags), gpus, variables, shown)


_CHUNKS = "--num-virtual-stages-per-pipeline-rank"


def _shown_of_pairs(job: RequestedJob, chunks: int) -> Iterator[tuple[str, Any]]:
    if chunks == 1:
        yield "virtual_pipeline_model_parallel_size", 1
    if job.memory.recomputes_layers:
        yield from ((f"recompute_{name}", None) for name in ("granularity", "method", "num_layers"))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer of Megatron ``release`` to a job.

    ``refusal`` is its error in one line, empty where it starts.  ``unasked`` is the reason why nobody knows,
    empty where Megatron was asked.  ``differs`` has arguments that it reads as another value than
    ``flag_table``, by their names.
    """

    release: str
    refusal: str = ""
    unasked: str = ""
    differs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """The verdict in words, for a job that Megatron does not refuse."""
        if self.unasked:
            return f"not held against Megatron's own checks: {self.unasked}"
        return f"Megatron {self.release} accepts these flags"

    def record(self) -> dict[str, Any]:
        """Return the verdict for a JSON file."""
        return {"release": self.release, "accepts": None if self.unasked else True, "line": self.line}

    def require_accepted(self) -> Self:
        """Return the verdict; ValueError, in Megatron's words, where it refuses the job."""
        if self.refusal:
            raise ValueError(f"Megatron {self.release} refuses these flags: {self.refusal}")
        return self


class Megatron:
    """The installed Megatron, as a context in which it is asked; the process that asks it ends with it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            _end(self._process)
            self._process = None

    def prepare(self, questions: Iterable[Question] = ()) -> None:
        """Begin to import Megatron, unless the answers to all ``questions`` are stored."""
        batch = list(questions)
        if self._process is None and _reason() is None and (not batch or not all(map(_stored, batch))):
            self._process = _start()

    def ask(self, question: Question) -> Verdict:
        """Return Megatron's verdict on a job; it is stored, unless nobody knows."""
        answer = self.answer(question)
        if isinstance(answer, str):
            return Verdict(release(), unasked=answer)
        unasked = answer["failure"] and f"this machine lacks what they need ({answer['failure']})"
        return Verdict(release(), answer["refusal"], unasked, answer["differs"])

    def answer(self, question: Question) -> dict[str, Any] | str:
        """Return the answer of ``megatron.trainer.acceptance``, or why there is none."""
        reason = _reason()
        if reason is not None:
            return reason
        answer = _stored(question)
        if answer is None:
            self.prepare()
            assert self._process is not None
            try:
                answer = _answer(self._process, question)
            except (OSError, ValueError) as error:
                return f"they gave no answer ({error})"
            if not answer["failure"]:
                _store(question, answer)
        return answer


def unknown_words(words: Sequence[str]) -> Sequence[str] | None:
    """Return the ``words`` of a command line that the installed Megatron does not know.

    None where it cannot be asked.
    """
    with Megatron() as megatron:
        answer = megatron.answer(Question(_without(words, flag_table.flags()), 1))
    return None if isinstance(answer, str) else answer["unknown"]


def _without(words: Sequence[str], flags: Collection[str]) -> tuple[str, ...]:
    """Return ``words``, a command line, without ``flags`` and their values."""
    rest = [(name, *values) for name, values in flag_table.by_name(words) if name not in flags]
    return tuple(chain.from_iterable(rest))


def _reason() -> str | None:
    """Return why Megatron cannot be asked; None where it can."""
    return None if _folder("training") else "megatron.training is not installed"


@cache
def _folder(name: str) -> Path | None:
    """Return the folder of the package ``name`` of the Megatron that Python would import, if there is one."""
    try:
        spec = find_spec(f"megatron.{name}")
    except ModuleNotFoundError:
        return None
    folders = spec.submodule_search_locations if spec else None
    return Path(folders[0]) if folders else None


@cache
def release() -> str:
    """Return the version of the Megatron that Python would import; empty if there is none.

    It may be that of a checkout, which has no metadata.
    """
    folder = _folder("core")
    try:
        text = "" if folder is None else read_text(folder / "package_info.py")
    except OSError:
        return ""
    numbers = re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE)
    before = re.findall(r"^PRE_RELEASE = ['\"](\w+)", text, re.MULTILINE)
    return ".".join(numbers) + "".join(before)


@cache
def _files() -> list[list[object]]:
    """Return a key of the files that decide on an answer, another where one of them changes."""
    core = _folder("core")
    assert core is not None
    paths = [path for name in _ANSWERS for path in (core.parent / name).glob("*.py")]
    return [[str(path), path.stat().st_mtime_ns, path.stat().st_size] for path in sorted(paths)]


def _place(question: Question) -> Path:
    return directory() / "megatron" / f"{key([VERSION, _files(), question.text()])}.json"


def _stored(question: Question) -> dict[str, Any] | None:
    """Return the stored answer; None where there is none, whatever is wrong with its file."""
    try:
        answer: dict[str, Any] = json.loads(read_text(_place(question)))
        return answer if answer.keys() == _ANSWER else None
    except (OSError, ValueError, AttributeError):
        return None


_ANSWER = {"refusal", "failure", "unknown", "differs"}
"""The keys of an answer."""


def _store(question: Question, answer: Mapping[str, Any]) -> None:
    """Store an answer; a folder that cannot be written is no error."""
    path = _place(question)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(answer) + "\n")
    except OSError:
        return


def _start() -> "subprocess.Popen[str]":
    """Start the process that asks Megatron; it imports from the same places, and no schedule is installed."""
    ours = [name for name in os.environ if name.startswith(PREFIX) and name != CACHE]
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "megatron_pp_ext.megatron.trainer.acceptance"],
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def _answer(process: "subprocess.Popen[str]", question: Question) -> dict[str, Any]:
    """Return the answer of ``process``; OSError or ValueError where there is none in time."""
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None
    try:
        stdin.write(question.text() + "\n")
        stdin.flush()
    except BrokenPipeError:
        raise OSError(_GONE) from None
    answer: dict[str, Any] = json.loads(_line(stdout))
    return answer


_GONE = "it could not be imported: mpp doctor finds out why"


def _line(stdout: IO[str]) -> str:
    """Return the next line of ``stdout``, whose buffer is empty between two answers."""
    ready, _, _ = select.select([stdout], [], [], _SECONDS)
    if not ready:
        raise OSError(f"none in {_SECONDS} seconds")
    line = stdout.readline()
    if not line:
        raise OSError(_GONE)
    return line
