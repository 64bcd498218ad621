"""A plugin of pytest (``-p``) for runs that judge a mutant, or tell which tests reach which line."""

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest
from hypothesis import Phase, settings

_MEMORY = 32 << 30
"""Bytes of addresses: what takes more fails, and leaves the machine its memory."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of a run that measures."""
    parser.addoption(
        "--reached", metavar="FILE", help="write which tests reach which line, and their seconds"
    )
    parser.addoption("--covered", metavar="FOLDER", help="look at the files below")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Begin to measure before anything is imported that is looked at."""
    given = early_config.known_args_namespace
    if given.reached:
        early_config.pluginmanager.register(_Reaching(Path(given.covered), Path(given.reached)), "reaching")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Draw the same examples each time, and spend no time on making a failing one small."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    phases = (Phase.explicit, Phase.generate)
    profile = settings(settings.default, phases=phases, database=None, derandomize=True)
    settings.register_profile("mutants", profile)
    settings.load_profile("mutants")


class _Reaching:
    """Measures each test, and tells coverage which one is running.

    Seconds are of the processor, so that they say little of how busy the machine is.
    """

    def __init__(self, folder: Path, out: Path) -> None:
        self._out = out
        self._seconds: dict[str, float] = {}
        self._cover = coverage.Coverage(data_file=None, include=[f"{folder.absolute()}/*"], config_file=False)
        self._cover.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._cover.switch_context(item.nodeid)
        before = sum(os.times()[:4])
        try:
            return (yield)
        finally:
            self._seconds[item.nodeid] = sum(os.times()[:4]) - before
            self._cover.switch_context("")

    def pytest_sessionfinish(self) -> None:
        self._cover.stop()
        data = self._cover.get_data()
        lines = {
            str(Path(file).relative_to(Path.cwd())): data.contexts_by_lineno(file)
            for file in data.measured_files()
        }
        self._out.write_text(json.dumps([lines, self._seconds]))
