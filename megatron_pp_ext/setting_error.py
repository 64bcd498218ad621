"""Errors about what a user has set, in names that whoever catches them may put into the user's own."""

import linecache


class NamesSettings(BaseException):
    """An error whose text names settings as on a command line: ``--num-experts``, ``--pipeline-order rule``.

    A setting that has no flag, an argument of ``install`` alone, is spelled like the others:
    ``--pipeline-ranks``, and with a value ``--pipeline-ranks=4``.  What came in by another door than a
    command line, a call or the environment, gets other names there (``job.model_config``).
    """


class SettingError(NamesSettings, ValueError):
    """A setting that cannot be."""


class StepError(NamesSettings, RuntimeError):
    """A step that cannot run as things are set, which shows only while it runs."""


class SettingExit(NamesSettings, SystemExit):
    """The end of a process, in one line, for a setting that cannot be."""


def failed_check(error: Exception) -> str:
    """Return in one line which check of Megatron's raised ``error``, since many of them have no message."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    message = " ".join(str(error).split())
    if trace is None:
        return message
    frame, line = trace.tb_frame, trace.tb_lineno
    check = message or linecache.getline(frame.f_code.co_filename, line).strip().rstrip(",\\ ")
    return f"{check} ({frame.f_globals.get('__name__')}, line {line})"
