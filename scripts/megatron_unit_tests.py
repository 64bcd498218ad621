"""Megatron-LM's own unit tests of pipeline schedules as the judge of this package, on a CPU.

    python -m scripts.megatron_unit_tests CHECKOUT [--out FILE.md] [--only WORD]

Run it in the root of this repository. It runs the tests three times over gloo, with stand-ins for torch.cuda:
as they are, with the package installed and no flag given, and with its `1f1b` and `interleaved` in the place
of Megatron's own schedules. A test that fails on one rank has failed. Ranks are forked from this process, and
started afresh after every failure and every hang, and after every test that has several ranks, so that each
is judged by itself.
"""

import argparse
import collections
import contextlib
import importlib
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import RankError, run_ranks  # before Megatron: installs the stand-ins for torch.cuda

FILES = {  # the ranks of a file's tests; files that a release lacks are left out
    "pipeline_parallel/test_schedules.py": 8,
    "pipeline_parallel/test_helpers.py": 1,
    "pipeline_parallel/test_mtp_loss_scale.py": 1,
    "training/test_train_step_schedule_plumbing.py": 1,
    "training/test_weight_and_optimizer_memory.py": 1,
    "test_training.py": 1,
    "test_optimizer_param_scheduler.py": 1,
    "test_num_microbatches_calculator.py": 1,
}
LEFT_OUT = ("test_get_pipeline_parallel_order",)
"""It lists the order of Megatron's interleaved schedule: groups are made 32 times, but no schedule runs."""
MODES = {
    "alone": "Megatron alone",
    "installed": "megatron_pp_ext installed",
    "in place": "its 1f1b and interleaved in the place of Megatron's",
}
SECONDS = 240
"""The time limit of a file's tests between two failures; the test that runs at its end hangs."""


class Journal:
    """A pytest plugin that records the outcome of every test as it happens, and ends at the first failure."""

    def __init__(self, file: Path, done: set[str], world: int) -> None:
        self._file, self._done, self._is_one_of_several = file, done, world > 1

    def pytest_collection_modifyitems(self, session: Any, items: list[Any]) -> None:
        """Leave out the tests that have an outcome."""
        self._session = session
        items[:] = [
            item for item in items if item.nodeid not in self._done and not item.name.startswith(LEFT_OUT)
        ]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record the test that starts, in case it hangs."""
        self._write("started", nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record the outcome: a test passes with its call, and fails with any of its phases."""
        if report.failed:
            self._write("failed", report.nodeid)
            print(report.longreprtext[-3000:])
            os._exit(1)
        if report.skipped or report.when == "call":
            self._write(report.outcome, report.nodeid)

    def pytest_runtest_logfinish(self) -> None:
        """End after each test of several ranks: every one makes process groups, and none destroys them."""
        if self._is_one_of_several:
            self._session.shouldstop = "fresh ranks for the next test"

    def _write(self, outcome: str, nodeid: str) -> None:
        with self._file.open("a") as file:
            file.write(f"{outcome} {nodeid}\n")


def test_on_rank(rank: int, file: str, mode: str, folder: str, done: set[str]) -> None:
    """Run the remaining tests of a file as one of its ranks."""
    if mode != "alone":
        from megatron_pp_ext.launch import install

        install()
    if mode == "in place":
        stand_in_for_schedules()
    settings = Path(folder, "pytest.ini")
    settings.write_text("[pytest]\n")
    options = ["-c", str(settings), "--rootdir", ".", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    journal = Journal(Path(folder, str(rank)), done, int(os.environ["WORLD_SIZE"]))
    pytest.main([*options, file], plugins=[journal])


def stand_in_for_schedules() -> None:
    """Replace Megatron's two pipeline schedules by this package's, for all callers."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    from megatron_pp_ext.compiler.request import Request
    from megatron_pp_ext.compiler.source import Source
    from megatron_pp_ext.megatron import requested
    from megatron_pp_ext.megatron.runners.choose import runner
    from megatron_pp_ext.schedule.costs import Costs
    from megatron_pp_ext.schedule.placement import Placement, Shape

    def stand_in(name: str, shape: Shape) -> Any:
        def run(*, model: Any, pg_collection: Any = None, **options: Any) -> list[Any]:
            chunks = len(model) if isinstance(model, list) else 1
            group = pg_collection.pp if pg_collection else parallel_state.get_pipeline_model_parallel_group()
            placement = Placement(shape, group.size(), chunks)
            request = Request(name, (placement,), options["num_microbatches"], splits_backward=False)
            pipeline = requested.Pipeline(request, Source(request, Costs.unit))
            requested.activate(pipeline)
            try:
                runner.cache_clear()  # each call has groups of its own
                return runner(pipeline)(model=model, pg_collection=pg_collection, **options)
            finally:
                requested.activate(None)

        return run

    schedules.forward_backward_pipelining_without_interleaving = stand_in("1f1b", Shape.LINEAR)
    schedules.forward_backward_pipelining_with_interleaving = stand_in("interleaved", Shape.LOOP)


def import_once(file: str) -> None:
    """Import a test file, so that its ranks are forked with its imports; they import the file itself anew."""
    # The suite would download data for tests that do not run here.
    stub = types.ModuleType("download_unit_tests_dataset")
    stub.download_and_extract_asset = lambda **options: None  # type: ignore[attr-defined]
    with contextlib.suppress(ImportError):
        sys.modules[f"tests.test_utils.python_scripts.{stub.__name__}"] = stub
        importlib.import_module("tests.unit_tests.conftest")
        importlib.import_module(file.removesuffix(".py").replace("/", "."))
    forget_tests(keep=stub)


def forget_tests(keep: types.ModuleType | None = None) -> None:
    """Drop the modules of ``tests``, which is the name of a package here and in Megatron's checkout."""
    for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
        if sys.modules[name] is not keep:
            del sys.modules[name]


def judge(file: str, world: int, mode: str) -> dict[str, str]:
    """Return the outcome of every test of a file."""
    outcomes: dict[str, str] = {}
    while True:
        with tempfile.TemporaryDirectory() as folder:
            ended, failure = True, ""
            try:
                run_ranks(test_on_rank, world, file, mode, folder, set(outcomes), timeout=SECONDS)
            except RankError as error:
                ended, failure = False, str(error)
            outcomes_now = together([path for path in Path(folder).iterdir() if path.name.isdigit()], world)
        outcomes |= outcomes_now
        if ended and not outcomes_now:
            return outcomes
        if ended:
            continue
        failures = [
            f"{outcome} {test}" for test, outcome in outcomes_now.items() if outcome in ("failed", "hung")
        ]
        print(*failures, failure[-1500:], sep="\n", flush=True)
        if not failures:
            return outcomes | {file: "failed"}


def together(journals: list[Path], world: int) -> dict[str, str]:
    """Return one outcome for each test from the journals of all ranks."""
    outcomes_of: dict[str, set[str]] = collections.defaultdict(set)
    ended: collections.Counter[str] = collections.Counter()
    for journal in journals:
        for line in journal.read_text().splitlines():
            outcome, test = line.split(" ", 1)
            outcomes_of[test].add(outcome)
            ended[test] += outcome != "started"
    outcomes = {}
    failed = any("failed" in outcomes for outcomes in outcomes_of.values())
    for test, of_test in outcomes_of.items():
        if "failed" in of_test:
            outcomes[test] = "failed"
        elif ended[test] == world:
            outcomes[test] = "skipped" if of_test == {"started", "skipped"} else "passed"
        elif not failed:
            outcomes[test] = "hung"
    return outcomes


def table(counts: dict[str, dict[str, collections.Counter[str]]], release: str, command: str) -> str:
    """Return the counts as a page of Markdown."""
    lines = [
        "# Megatron-LM's own unit tests",
        "",
        f"Megatron-LM {release}, on a CPU over gloo: passed / failed or hung / skipped. Regenerate with",
        f"`{command}`.",
        "",
        f"| file | {' | '.join(MODES.values())} |",
        "|---|" + "---|" * len(MODES),
    ]
    for file, modes in counts.items():
        cells = [f"{c['passed']} / {c['failed'] + c['hung']} / {c['skipped']}" for c in modes.values()]
        lines.append(f"| {file} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Judge every file in every mode, and list the tests that pass alone but not with the package."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="a Megatron-LM checkout")
    parser.add_argument("--out", type=Path, help="where the table goes")
    parser.add_argument("--only", default="", help="only files with this in their path")
    options = parser.parse_args()
    tests = options.checkout / "tests/unit_tests"
    if not tests.is_dir():
        raise SystemExit(f"{options.checkout} has no tests/unit_tests; give a Megatron-LM checkout")
    out = options.out.absolute() if options.out else None
    os.chdir(options.checkout)
    sys.path.insert(0, str(options.checkout.absolute()))
    forget_tests()
    # Imported before the ranks are forked, because each would import it by itself.
    from megatron.core import __version__ as release

    counts: dict[str, dict[str, collections.Counter[str]]] = {}
    worse = []
    for file, world in FILES.items():
        if options.only not in file or not (Path("tests/unit_tests") / file).exists():
            continue
        import_once(f"tests/unit_tests/{file}")
        outcomes = {mode: judge(f"tests/unit_tests/{file}", world, mode) for mode in MODES}
        counts[file] = {mode: collections.Counter(of_mode.values()) for mode, of_mode in outcomes.items()}
        for mode in MODES:
            print(file, mode, dict(counts[file][mode]), flush=True)
        for test, outcome in outcomes["alone"].items():
            worse += [
                f"{mode}: {of_mode.get(test)} {test}"
                for mode, of_mode in outcomes.items()
                if outcome == "passed" and of_mode.get(test) != "passed"
            ]
    page = table(counts, release, "python -m scripts.megatron_unit_tests CHECKOUT --out FILE")
    if worse:
        page += "\nPassed by Megatron alone, but not\n\n" + "".join(f"* {line}\n" for line in worse)
    if out:
        out.write_text(page)
    print(page)
    with contextlib.suppress(BrokenPipeError):
        sys.exit(bool(worse))


if __name__ == "__main__":
    main()
