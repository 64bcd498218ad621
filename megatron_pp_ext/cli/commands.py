"""The program ``mpp``, its errors in one line, and the command that lists schedules."""

import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from megatron_pp_ext.cli.report import console
from megatron_pp_ext.jobs.failure import ended_as_by_the_keyboard
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.entry import ALIASES, OTHERS
from megatron_pp_ext.version import VERSION, needs


class OneLineErrors(TyperGroup):
    """A command group that reports bad input in one line.

    Everywhere in this project the messages of ValueError and OSError are written for users.  Errors of the
    command line's parser and overflows are reported in the same form.  Any other exception is a bug, and
    shows its traceback.
    """

    def main(
        self, args: Sequence[str] | None = None, prog_name: str | None = None, *rest: Any, **extra: Any
    ) -> Any:
        """Run the command and exit with its code; without arguments, show the help.

        The context's ``obj`` is the command line, as a shell reads it.
        """
        arguments = list(sys.argv[1:] if args is None else args)
        extra |= {"standalone_mode": False, "obj": shlex.join([prog_name or "mpp", *arguments])}
        try:
            with ended_as_by_the_keyboard():
                sys.exit(super().main(arguments or ["--help"], prog_name, *rest, **extra))
        except typer.Abort:
            _leave("stopped", 1)
        except OSError as error:
            _leave(f"{error.filename}: {error.strerror}{_fix(error)}" if error.filename else str(error), 2)
        except ValueError as error:
            _leave(self._misplaced(arguments[0], error) or str(error), 2)
        except ModuleNotFoundError as error:
            fix = needs(error.name or "")
            if not fix:
                raise
            _leave(fix, 2)
        except OverflowError as error:
            _leave(f"a number is too large to count with ({error}): correct what was given", 2)
        except Exception as error:
            # Typer comes with click or with a copy of it, so that the parser's exceptions have no one class
            # to catch; they are those that have a format_message.
            message = getattr(error, "format_message", None)
            if message is None:
                raise
            text = message()
            _leave(self._misplaced(arguments[0], error) or f"{text}{_what_fits(text, arguments[0])}", 2)

    def _misplaced(self, command: str, error: Exception) -> str:
        """Return the right place of a word on the wrong side of --, or "" for other errors."""
        from megatron_pp_ext.job import flag_table

        parameters = self.commands[command].params if command in self.commands else ()
        if isinstance(error, flag_table.UnknownFlag):
            options = [option for parameter in parameters for option in parameter.opts]
            return f"{error.flag} is an option of mpp {command}: put it before --" * (error.flag in options)
        option = getattr(error, "option_name", None)
        if option is None or not any(
            (parameter.name, parameter.nargs) == ("flags", -1) for parameter in parameters
        ):
            return ""
        options_of_training = flag_table.known_flags()
        if option in options_of_training:
            return f"{option} is a flag of training: put it after --, as in mpp {command} ... -- {option} ..."
        guess = (
            "" if getattr(error, "possibilities", None) else flag_table.hint(option, options_of_training, "")
        )
        return guess and f"{option} is no option of mpp {command}, and training's come after --: {guess}"


ELSEWHERE = {
    "measure bench benchmark": "mpp calibrate (this machine), profile (a model's layers), rehearse (a job)",
    "plan tune optimize auto": "mpp search (the best configuration), estimate (one configuration)",
    "draw plot show picture": "mpp schedule (one schedule), compare (all of them)",
    "check test validate": "mpp doctor (this machine), verify (losses of a job)",
    "schedules": "mpp list (names), compare (all of them)",
    "train run": "torchrun ... -m megatron_pp_ext SCRIPT --pipeline-schedule NAME",
}
"""The commands for what other programs call otherwise, by these words."""


def _what_fits(message: str, command: str) -> str:
    """Return the fix that the parser's ``message`` lacks, to follow it; ``command`` is the first word."""
    if message.startswith("No such command"):
        meant = [commands for words, commands in ELSEWHERE.items() if command in words.split()]
        if meant:
            return f" Look at {meant[0]}."
        return "" if "Did you mean" in message else " mpp --help lists them."
    for kind, fix in {"a valid integer": "a whole number, such as 4", "a valid number": "a number"}.items():
        if kind in message:
            return f": give {fix}"
    return ""


def _fix(error: OSError) -> str:
    """Return what to do about a path that is not there or closed, to follow its name."""
    if isinstance(error, FileNotFoundError):
        return "; correct the path, or make its folder"
    return "; correct the path, or its permissions" if isinstance(error, PermissionError) else ""


def _leave(message: str, code: int) -> None:
    line = " ".join(message.split())
    # Words of files stand in it, and a terminal obeys some characters that cannot be printed.
    text = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in line
    )
    typer.echo(f"mpp: {text}", err=True)
    sys.exit(code)


app = typer.Typer(cls=OneLineErrors, help="Pipeline schedules for Megatron-LM.", rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
) -> None:
    """Pipeline schedules for Megatron-LM."""
    if version:
        console.print(f"megatron_pp_ext {VERSION}")
        raise typer.Exit


@app.command("list")
def list_schedules() -> None:
    """List the schedules that --pipeline-schedule accepts."""
    from megatron_pp_ext.view import terminal

    rows: list[Sequence[str]] = [
        (entry.name, entry.summary, entry.shape, entry.chunks_phrase, entry.paper)
        for entry in catalog.ENTRIES.values()
    ]
    rows += [(other.name, other.summary, other.placement, other.chunks, other.source) for other in OTHERS]
    console.print(terminal.schedule_table(rows))
    aliases = ", ".join(f"{alias} = {name}" for alias, name in ALIASES.items())
    console.print(f"Elsewhere called: {aliases}", style="dim")
