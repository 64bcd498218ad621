"""The command blocks of the documents, and the reasons why a machine for tests cannot run some of them.

A block is fenced and called ``bash``.  One that is not run has its reason in a comment before it:

    <!-- not run in tests: needs GPUs -->
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

DOCUMENTS = [
    path for folder in (".", "docs", "examples", "patches") for path in sorted((ROOT / folder).glob("*.md"))
]
"""What a user reads; the tables of results are written by benchmarks."""

COMMANDS = {"bash", "sh", "shell", "console"}
"""The names of fenced blocks that hold commands; the first is the one to use."""

REASONS = (
    "needs GPUs",
    "needs SLURM",  # run with DRY_RUN=1 and a stand-in for sbatch
    "needs the network",
    "needs a checkout",
    "placeholders",  # a pattern that the reader completes, such as ARGS...
    "long",
)
ELSEWHERE = re.compile(r"tested in (tests/\S+\.py)")
"""The reasons not to run a block."""

PLACEHOLDER = re.compile(r"\.\.\.|/path/to\b|\b(?:ARGS|FLAGS|CHECKOUT|SCRIPT\.py|FILE)\b(?!=)")

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\S*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
_REASON = re.compile(r"<!-- not run in tests: (.*) -->\n\s*\Z")


@dataclass(frozen=True)
class Block:
    """A fenced block: its place, its language, and its text."""

    document: Path
    line: int
    language: str
    text: str
    reason: str | None
    """The reason not to run it."""
    output: str
    """The output that the ``text`` block after it shows; nothing without one."""

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"

    def missing(self, output: str) -> list[str]:
        """Return the lines that the document shows and ``output`` lacks; "..." stands for anything."""
        return [
            line
            for line in self.output.splitlines()
            if not re.search(
                f"^{re.escape(line.rstrip()).replace(re.escape('...'), '.*')} *$", output, re.MULTILINE
            )
        ]

    def commands(self) -> Iterator[list[str]]:
        """The words of every line, without comments; a line that ends in a backslash goes on."""
        for line in self.text.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def blocks_of(document: Path) -> Iterator[Block]:
    """Every fenced block of ``document``."""
    text = document.read_text()
    for fence in _FENCE.finditer(text):
        before, behind = text[: fence.start()], text[fence.end() :].lstrip("\n")
        reason, output = _REASON.search(before), _FENCE.match(behind)
        yield Block(
            document,
            before.count("\n") + 1,
            fence["language"],
            fence["text"],
            reason[1] if reason else None,
            output["text"] if output and output["language"] == "text" else "",
        )


def command_blocks() -> list[Block]:
    """Every block of commands in all documents."""
    return [block for document in DOCUMENTS for block in blocks_of(document) if block.language in COMMANDS]


def prose(document: Path) -> str:
    """The text of ``document`` without its fenced blocks."""
    return _FENCE.sub("", document.read_text())


def launched(words: list[str]) -> tuple[int, list[str]] | None:
    """The ranks and the training flags of a line that starts the launcher; None for another line.

    Under SLURM a node has 8 GPUs unless GPUS_PER_NODE says otherwise.
    """
    if "sbatch" in words:
        (script,) = (at for at, word in enumerate(words) if word.endswith((".sbatch", ".sh")))
        if not (flags := words[script + 1 :]):
            return None  # a script that has its flags itself
        (gpus, *_) = [word.partition("=")[2] for word in words if word.startswith("GPUS_PER_NODE=")] or ["8"]
        return int(gpus) * _number("--nodes", words[:script]), flags
    for at in range(1, len(words)):
        if words[at - 1] == "-m" and words[at].startswith("megatron_pp_ext"):
            before, flags = words[:at], [word for word in words[at + 1 :] if word != "--cpu"]
            ranks = _number("--nproc-per-node", before) * _number("--nnodes", before)
            return ranks, flags[words[at] == "megatron_pp_ext" :]
    return None


def _number(option: str, words: list[str]) -> int:
    """The number that follows ``option`` in ``words``, 1 without it."""
    return int(words[words.index(option) + 1]) if option in words else 1
