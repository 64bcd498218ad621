"""The one line of a failed run's output that says why it failed."""

import re

_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|OutOfMemoryError|oom.kill", re.IGNORECASE)
_REASON = re.compile(r"(megatron_pp_ext: |\w*(Error|Exception)(: |$)|.*: error: )")
_TORCHRUN_FAILED = re.compile(
    r"^E\d{4} .*torch/distributed/elastic/.* failed \(exitcode: (-?\d+)\)", re.MULTILINE
)
_MARKS = re.compile(r"[\^~=-]+")


def is_out_of_memory(output: str) -> bool:
    """Return whether a run that printed ``output`` failed for lack of memory."""
    return _OUT_OF_MEMORY.search(output) is not None


def reason(output: str, out_of_memory: bool = False) -> str:
    """Return the line of a failed run's ``output`` that most likely says why it failed.

    That is the last line that looks like an error of this package, of Python or of a parser of flags, or else
    the last one; if ``out_of_memory``, only lines about memory count.
    """
    # What torchrun adds is the same for every failure, except for a rank that was killed and printed nothing.
    own, code, *_ = [*_TORCHRUN_FAILED.split(output, maxsplit=1), ""]
    if out_of_memory:
        own, code = "\n".join(filter(is_out_of_memory, output.splitlines())), ""
    if code == "-9":
        return "a rank was killed, as happens when the machine's memory is full"
    lines = [line for line in map(str.strip, own.splitlines()) if line and not _MARKS.fullmatch(line)]
    if not lines:
        return "it printed nothing"
    at = max((at for at, line in enumerate(lines) if _REASON.match(line)), default=len(lines) - 1)
    # An exception without a message is explained by the line that raised it.
    is_bare = at > 0 and lines[at].endswith(("Error", "Exception"))
    return f"{lines[at - 1]}: {lines[at]}" if is_bare else lines[at]
