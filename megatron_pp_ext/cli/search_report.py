"""Presents the result of a search: on the terminal, as a picture, a page, numbers, and scripts."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from megatron_pp_ext.cli.estimate import show_launch, show_not_counted
from megatron_pp_ext.cli.report import console, folding
from megatron_pp_ext.costs.system import System
from megatron_pp_ext.files import write_whole
from megatron_pp_ext.planner.search import launch_lines
from megatron_pp_ext.planner.search.candidate import offered
from megatron_pp_ext.planner.search.configurations import record
from megatron_pp_ext.planner.search.flag_gains import FlagGains
from megatron_pp_ext.planner.search.replays import Evaluated
from megatron_pp_ext.planner.search.result import SearchResult, why
from megatron_pp_ext.planner.step.comparison import Comparison

_LABELS: Mapping[str, str] = {
    "tp, cp, ep, etp, pp, dp": "ranks that share tensors, context, experts, an expert, layers, and data",
    "mb": "sequences of a microbatch",
    "v-half, 1f1b, ...": "the schedule; a number after it is that of its chunks a rank, from three on",
    "shared": "all pipeline ranks share the embedding and the output layer",
    "recompute-...": "activations that the backward computes again: full ones, or of some modules",
    "uneven": "stages have different numbers of layers, which the command has as a layout",
    "MFU": "the part of the devices' peak rate that the model's own arithmetic is",
    "bubble": "the part of a pipeline's time in which ranks are idle",
    "GB a rank": "what the fullest rank needs as estimated, and at most; messages are a part of it",
}


def _labels() -> dict[str, str]:
    """Return the meanings of a configuration's words, a feature's before the numbers of a table."""
    at = list(_LABELS).index("MFU")
    labels, of_features = list(_LABELS.items()), [variants.label for variants in offered()]
    return dict([*labels[:at], *of_features, *labels[at:]])


_AT_SIZES = "at the sizes of the best, with as many layers in every stage"
_ALIKE = "nearly as fast"
_COLUMNS = (
    "",
    "configuration",
    "step s",
    "MFU",
    "bubble",
    "GB a rank",
    "messages",
    "behind the best",
    _ALIKE,
)


@dataclass(frozen=True, slots=True)
class Report:
    """The result for the model of the flags ``words`` on ``gpus`` of ``system`` with ``limit`` bytes each.

    ``about`` states what was asked: the model, sequences a step and tokens a sequence, command and date.
    Peaks may be above their estimates by the part ``above``.  ``script`` is the user's training script,
    ``filled_in`` are those of ``words`` that the user did not give, ``not_counted`` what estimates are made
    without.  ``compared`` has the best with Megatron's own schedules at its sizes, where these differ.
    """

    result: SearchResult
    words: list[str]
    about: Mapping[str, Any]
    system: System
    gpus: int
    limit: float
    above: float
    script: Path | None = None
    filled_in: tuple[str, ...] = ()
    not_counted: tuple[str, ...] = ()
    compared: Comparison | None = None
    gains: FlagGains | None = None

    def show(self) -> None:
        """Print the table, the shortest steps for less memory, and the command that starts the best."""
        result = self.result
        console.print(f"{self._looked_at()}\n{self._room()}; {result.best[0].estimate.grounds}")
        show_not_counted(self.not_counted)
        table = folding(*_COLUMNS[:-3])
        for number, name, *numbers, _, behind, alike in self._rows():
            notes = (("behind", behind), (_ALIKE, alike))
            lines = [name, *(f"  {title}: {note}" for title, note in notes if note)]
            table.add_row(number, "\n".join(lines), *numbers)
        console.print(table)
        if self.compared:
            console.print(f"{_AT_SIZES.capitalize()}:")
            for line in self.compared.lines:
                console.print(f"  {line}")
        if self.gains and self.gains.lines:
            console.print(f"{self._not_tried}:")
            for line in self.gains.lines:
                console.print(f"  {line}")
        console.print("The shortest steps for less memory, each with the flags that it sets:")
        for choice in result.for_less_memory:
            memory, step = choice.estimate.fullest.total / 1e9, choice.estimate.step_seconds
            console.print(f"  {memory:6.1f} GB  {step:.4g} s  {choice.candidate.name}")
            if choice != result.best[0]:
                typer.echo(f"    {launch_lines.folded(choice.candidate.flags(), 4)}")
        for candidate, fullest in result.too_large:
            size, name = max((size, name) for name, size in fullest.components())
            console.print(
                f"kept out by memory alone: {candidate.name}, {fullest.total / 1e9:.1f} GB, "
                f"{size / 1e9:.1f} GB of it {name}",
                style="dim",
            )
        self.show_command("To run the best:", result.best[0])
        if self.gains and self.gains.shortest:
            show_launch(f"To run the shortest with {self.gains.words}:", self._launch_of(self.gains), ())

    @property
    def _not_tried(self) -> str:
        """The flags in ``gains``, in words."""
        assert self.gains is not None
        return f"Flags that were not tried, which are yours to choose, with {self.gains.best.candidate.name}"

    def _looked_at(self) -> str:
        """Report how many configurations there are, and whether the search went to its end."""
        result = self.result
        return (
            f"{result.legal:,} configurations of {self.gpus} x {self.system.name}: "
            f"{result.unfit:,} cannot fit, {result.replayed:,} were replayed; "
            f"{result.stopped or self._ended()}"
        )

    def _ended(self) -> str:
        """Report what the search has proved of the others at its end."""
        proved = "of those that were tried, none of the others can be among the best"
        untimed = [f"{count:,} {words}" for words, count in self.result.left_out.items()]
        return f"{proved}, but for {' and '.join(untimed)}, which were not timed" if untimed else proved

    def _room(self) -> str:
        offered = self.system.memory_bytes
        free = f", {1 - self.limit / offered:.0%} stay free" if self.limit < offered else ""
        measured = f"; measured peaks were up to {self.above:.0%} above their estimates"
        return f"{self.limit / 1e9:.1f} GB a GPU of {offered / 1e9:.1f}{free} (--memory){measured}"

    def show_command(self, title: str, choice: Evaluated) -> None:
        """Print ``title`` and the command that starts ``choice``."""
        show_launch(title, self._launch(choice), self.filled_in)

    def content(self) -> dict[str, Any]:
        """Return the numbers for a JSON file."""
        result = self.result
        best = result.best[0]
        return {
            **self.about,
            "system": self.system.name,
            "gpus": self.gpus,
            "memory_limit": self.limit,
            "peaks_above_estimates": self.above,
            "legal": result.legal,
            "unfit": result.unfit,
            "replayed": result.replayed,
            "stopped": None if result.stopped is None else str(result.stopped),
            "not_counted": self.not_counted,
            "compared": self.compared and self.compared.record(),
            "flags_not_tried": self.gains and self.gains.record(),
            "with_flags": self._with_flags(),
            "best": [
                {
                    **self._record(choice),
                    "behind": why(best, choice),
                    "alike": [self._record(other) for other in result.alike[choice.candidate]],
                }
                for choice in result.best
            ],
            "for_less_memory": [self._record(choice) for choice in result.for_less_memory],
            "frontier": [self._point(choice) for choice in result.frontier],
        }

    def _record(self, choice: Evaluated) -> dict[str, Any]:
        """Return the numbers of ``choice`` and the command that starts it."""
        return {
            "name": choice.candidate.name,
            "candidate": record(choice.candidate),
            "estimate": asdict(choice.estimate),
            **self._launch(choice).record(),
        }

    def _with_flags(self) -> dict[str, Any] | None:
        """Return the shortest step with flags that were not tried, and its command, for a JSON file."""
        if self.gains is None or self.gains.shortest is None:
            return None
        shortest = self.gains.shortest
        return {
            "added_flags": self.gains.words,
            "name": shortest.candidate.name,
            "candidate": record(shortest.candidate),
            "estimate": asdict(shortest.estimate),
            **self._launch_of(self.gains).record(),
        }

    def _point(self, choice: Evaluated) -> dict[str, Any]:
        estimate = choice.estimate
        sizes = {"bytes": estimate.fullest.total, "step_seconds": estimate.step_seconds}
        return {"name": choice.candidate.name, **sizes}

    def draw(self, path: Path) -> None:
        """Draw memory against throughput."""
        from megatron_pp_ext.view import memory_tradeoff

        best, frontier = self._points()
        memory_tradeoff.draw_configurations(best, frontier, self.limit, path, self._title())

    def page(self) -> str:
        """Return all of it as one self-contained HTML page."""
        from megatron_pp_ext.view import memory_tradeoff, search_page

        best, frontier = self._points()
        commands = {choice.candidate.name: self._launch(choice).text for choice in self._shown()}
        if self.gains and self.gains.shortest:
            name = f"{self.gains.shortest.candidate.name} with {self.gains.words}"
            commands[name] = self._launch_of(self.gains).text
        about = {
            "searched": self._looked_at(),
            "command": self.about["command"],
            "date": self.about["date"],
            "memory": self._room(),
            "estimates": self.result.best[0].estimate.grounds,
        }
        if self.not_counted:
            about["not counted"] = "; ".join(self.not_counted)
        if self.compared:
            about[_AT_SIZES] = "; ".join(self.compared.lines)
        if self.gains and self.gains.lines:
            about[self._not_tried] = "; ".join(self.gains.lines)
        picture = memory_tradeoff.configurations_svg(best, frontier, self.limit, "")
        return search_page.text(
            self._title(), picture, _COLUMNS, self._rows(), self._stock_rows(), commands, about, _labels()
        )

    def _stock_rows(self) -> list[list[str]]:
        """Return rows for Megatron's own schedules at the sizes of the best, as far as they are compared."""
        compared = self.compared
        steps = (compared.stock, compared.interleaved) if compared else ()
        return [
            [
                "",
                step.name,
                f"{step.step_seconds:.4g}",
                "",
                "",
                self._gigabytes(step.fullest_bytes),
                "",
                "",
                "",
            ]
            for step in steps
            if step is not None
        ]

    def write_batch_files(self, folder: Path) -> None:
        """Write a script for each of the best that submits it to SLURM."""
        folder.mkdir(parents=True, exist_ok=True)
        for number, choice in enumerate(self.result.best, 1):
            comment = f"Estimated on {self.gpus} x {self.system.name}: {choice.estimate.summary}."
            name, gpus_per_node = choice.candidate.name, self.system.gpus_per_node
            text = launch_lines.batch_file(name, self.flags(choice), self.gpus, gpus_per_node, comment)
            file = folder / f"{number:02}-{name}.sh"
            write_whole(file, text)
            file.chmod(0o755)

    def _rows(self) -> list[list[str]]:
        result = self.result
        best = result.best[0]
        return [
            [
                str(number),
                choice.candidate.name,
                f"{choice.estimate.step_seconds:.4g}",
                choice.estimate.mfu,
                f"{choice.estimate.bubble:.1%}",
                self._gigabytes(choice.estimate.fullest.total),
                f"{choice.estimate.fullest.messages / 1e9:.2f}",
                why(best, choice),
                self._alike(choice),
            ]
            for number, choice in enumerate(result.best, 1)
        ]

    def _gigabytes(self, total: float) -> str:
        """Return the estimate of a rank's bytes, and the upper bound of its peak."""
        return f"{total / 1e9:.1f}-{(1 + self.above) * total / 1e9:.1f}"

    def _alike(self, choice: Evaluated) -> str:
        """Report which schedules are nearly as fast as ``choice``'s: of each family the fastest."""
        families = {choice.candidate.schedule: choice}
        for other in self.result.alike[choice.candidate]:
            families.setdefault(other.candidate.schedule, other)
        names = [
            f"{other.candidate.order} +{other.estimate.step_seconds / choice.estimate.step_seconds - 1:.1%}"
            for other in list(families.values())[1:]
        ]
        return ", ".join(names)

    def flags(self, choice: Evaluated) -> list[str]:
        return choice.candidate.flags(self.words)

    def _launch(self, choice: Evaluated) -> launch_lines.Launch:
        return launch_lines.Launch(self.flags(choice), self.gpus, self.system.gpus_per_node, self.script)

    def _launch_of(self, gains: FlagGains) -> launch_lines.Launch:
        """Return the start of the shortest step with flags that were not tried."""
        assert gains.shortest is not None
        flags = gains.flags(self.words)
        return launch_lines.Launch(flags, self.gpus, self.system.gpus_per_node, self.script)

    def _points(self) -> tuple[list[Any], list[Any]]:
        from megatron_pp_ext.view.memory_tradeoff import Point

        def point(choice: Evaluated, name: str) -> Point:
            estimate = choice.estimate
            return Point(name, estimate.fullest.total, estimate.tokens_per_second)

        # The names of all the best would cover each other, and the table has them by number.
        best = [point(choice, f"{number}") for number, choice in enumerate(self.result.best, 1)]
        named = [choice.candidate for choice in self.result.for_less_memory]
        return best, [
            point(choice, choice.candidate.name if choice.candidate in named else "")
            for choice in self.result.frontier
        ]

    def _title(self) -> str:
        model, batch, length = (self.about[name] for name in ("model", "global_batch_size", "seq_length"))
        return f"{model} on {self.gpus} x {self.system.name}, {batch} sequences of {length} tokens a step"

    def _shown(self) -> list[Evaluated]:
        """The best, and the others that are the shortest for less memory."""
        return [
            *self.result.best,
            *(choice for choice in self.result.for_less_memory if choice not in self.result.best),
        ]
