"""Why a run failed, in one line, and the signals that end a command."""

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_as_by_the_keyboard() -> Iterator[None]:
    """Treat SIGTERM of a batch system and SIGHUP of a lost terminal like Ctrl-C, so that runs are ended."""
    process = os.getpid()

    def interrupt(number: int, frame: object) -> None:
        if os.getpid() != process:
            os._exit(128 + number)  # a forked process ends as it would without this handler
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|OutOfMemoryError|oom.kill", re.IGNORECASE)
_REASON = re.compile(r"megatron_pp_ext: |[\w.]*(Error|Exception)(: |$)|[^:]*: error: |what\(\): ")
# What a rank reports because another one has ended.
_CONSEQUENCE = re.compile(
    r"has ended, or does not answer, while "
    r"|Connection (closed|reset) by peer|Connection was likely closed|Broken pipe|remote process exit"
    r"|^srun: error: .*[Ee]xited with exit code"
)
# By Python, by its logging, and by what torch logs from C++ and from torchrun.
_WARNING = re.compile(r"\S.*:\d+: \w*Warning: |WARNING\b|\[?W\d{4} ")
_TORCHRUN_FAILED = re.compile(r"E\d{4} .*torch/distributed/elastic/.* failed \(exitcode: (-?\d+)\)")
# ``srun --label``, ``torchrun --tee`` and torch's hook for exceptions, in this order.
_LINE = re.compile(r"^((?:\d+: )?(?:\[[A-Za-z]\w*\d\]: ?)*)(.*)$", re.MULTILINE)
_MARKS = re.compile(r"[\^~=-]+")


def is_out_of_memory(output: str) -> bool:
    """Return whether a run that printed ``output`` failed for lack of memory."""
    return _OUT_OF_MEMORY.search(output) is not None


def reason(output: str, out_of_memory: bool = False) -> str:
    """Return the line of a failed run's ``output`` that most likely states why it failed.

    That is the last line that looks like an error of this package, of Python or of a parser of flags, better
    one that does not follow from the end of another rank, or else the last one that is no warning; if
    ``out_of_memory``, only lines about memory count.  What names the rank in front of a line is left out.
    """
    if out_of_memory:
        output = "\n".join(filter(is_out_of_memory, output.splitlines()))
    lines: list[tuple[str, str]] = []
    for rank, line in _without_warnings(output):
        # What torchrun adds is always the same, except for a rank that was killed and could report nothing.
        if failed := _TORCHRUN_FAILED.match(line):
            if failed[1] == "-9":
                return "a rank was killed, as happens when the machine's memory is full"
            break
        lines.append((rank, line))
    if not lines:
        return "it printed nothing"
    at = max(range(len(lines)), key=lambda at: (_weight(lines[at][1]), at))
    rank, line = lines[at]
    # An exception without a message is explained by the line that raised it.
    if line.endswith(("Error", "Exception")):
        before = [text for other, text in lines[:at] if other == rank]
        return ": ".join([*before[-1:], line])
    return line


def _weight(line: str) -> int:
    """Return how well ``line`` explains a failure: 0 hardly, 1 by what followed, 2 by what happened."""
    if not _REASON.match(line):
        return 0
    return 1 if _CONSEQUENCE.search(line) else 2


def _without_warnings(output: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of ``output`` that have words, each after what names its rank."""
    warned: set[str] = set()
    for prefix, line in _LINE.findall("\n".join(output.splitlines())):
        rank = prefix.strip()  # the last space may belong to the line
        follows_warning = rank in warned
        warned.discard(rank)
        if _WARNING.match(line):
            warned.add(rank)
        elif follows_warning and line[:1].isspace():
            continue  # the statement that warned
        elif (text := line.strip()) and not _MARKS.fullmatch(text):
            yield rank, text
