"""Errors about what a user has set, in names that whoever catches them may put into the user's own."""


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
