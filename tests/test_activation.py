"""Schedules that the environment asks for, in programs that know nothing of this package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_pp_ext import activation, startup_file
from tests.support.tiers import wide

ASKED = {"MEGATRON_PP_SCHEDULE": "v-half", "MEGATRON_PP_RANKS": "4", "MEGATRON_PP_MICROBATCHES": "32"}


@pytest.fixture(autouse=True)
def _own_site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_file.sysconfig, "get_path", lambda kind: str(tmp_path))


def run(folder: Path, program: str, **environment: str) -> str:
    """Return what ``program`` prints in a Python that reads ``folder`` at its start, as site-packages."""
    (folder / "megatron" / "core").mkdir(parents=True, exist_ok=True)
    (folder / "megatron" / "core" / "__init__.py").write_text("print('core')\n")
    start = f"import site, sys; sys.path.insert(0, {str(folder)!r}); site.addsitedir({str(folder)!r})\n"
    without = {name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_PP_")}
    ran = subprocess.run(
        [sys.executable, "-c", start + program],
        env=without | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.stdout + ran.stderr


BY_CALL = "from megatron_pp_ext.megatron import by_call; by_call.install"
INSTALLED = f"{BY_CALL} = lambda **asked: print(asked)\nimport megatron.core\n"


def test_the_schedule_is_installed_right_after_megatron_core_is_imported(tmp_path: Path) -> None:
    assert startup_file.activate().parent == tmp_path
    asked = "{'schedule': 'v-half', 'ranks': 4, 'microbatches': 32}"
    assert run(tmp_path, INSTALLED, **ASKED) == f"core\n{asked}\n"


def test_without_the_variable_nothing_of_ours_is_imported(tmp_path: Path) -> None:
    startup_file.activate()
    program = (
        "import megatron.core; print([name for name in sys.modules if name.startswith('megatron_pp_ext')])"
    )
    assert run(tmp_path, program) == "core\n[]\n"


def test_deactivated_it_is_as_before(tmp_path: Path) -> None:
    startup_file.activate()
    assert startup_file.is_active()
    assert startup_file.deactivate()
    assert not startup_file.is_active()
    assert not startup_file.deactivate()
    assert run(tmp_path, INSTALLED, **ASKED) == "core\n"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"MEGATRON_PP_RANKS": ""},
            "MEGATRON_PP_SCHEDULE=v-half needs MEGATRON_PP_RANKS; set it to the pipe",
        ),
        (
            {"MEGATRON_PP_SCHEDULE": ""},
            "MEGATRON_PP_RANKS=4 needs MEGATRON_PP_SCHEDULE; set it to a schedule of mpp list",
        ),
        ({"MEGATRON_PP_RANKS": "four"}, "MEGATRON_PP_RANKS=four is no number; set it to one, or unset it"),
        (
            {"MEGATRON_PP_UNPROVED": "yes"},
            "MEGATRON_PP_UNPROVED=yes is neither 1 nor 0; set it to 1 or",
        ),
        ({"MEGATRON_PP_ORDER": "best"}, "MEGATRON_PP_ORDER is 'best'; give 'given', 'rule' or 'search'"),
        ({"MEGATRON_PP_LOSS_RANK": "2"}, "MEGATRON_PP_LOSS_RANK is '2'; give 'first' or 'last', or leave it"),
        (
            {"MEGATRON_PP_RANK": "4"},
            "MEGATRON_PP_RANK is unknown; unset it, or correct its name: did you mean 'MEGATRON_PP_RANKS'?",
        ),
    ],
)
def test_what_cannot_be_read_ends_the_process_in_one_line(tmp_path, given, said):
    startup_file.activate()
    printed = run(tmp_path, "import megatron.core; print('never')", **{**ASKED, **given}).splitlines()
    assert printed[0] == "core"
    assert printed[1].startswith(f"megatron_pp_ext: {said}")
    assert len(printed) == 2


@pytest.mark.parametrize("name", ["MEGATRON_PP_SHEDULE", "MEGATRON_PP_EXT_SCHEDULE"])
def test_a_misspelled_schedule_does_not_leave_stock_in_force(tmp_path: Path, name: str) -> None:
    startup_file.activate()
    given = {name: "v-half", "MEGATRON_PP_RANKS": "4", "MEGATRON_PP_MICROBATCHES": "32"}
    printed = run(tmp_path, "import megatron.core; print('never')", **given).splitlines()
    line = f"megatron_pp_ext: {name} is unknown; unset it, or correct its name: did you mean"
    assert printed[0] == "core" and printed[1].startswith(line) and len(printed) == 2


FAILING = """
class Failing:
    def find_spec(self, name, path=None, target=None):
        if name == "megatron.core":
            raise ImportError("for now")
sys.meta_path.insert({at}, Failing())
try:
    import megatron.core
except ImportError as error:
    print(error)
del sys.meta_path[{at}]
"""


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("import importlib.util; importlib.util.find_spec('megatron.core')", ""),
        (FAILING.format(at=0), "for now\n"),
        wide((FAILING.format(at=1), "for now\n")),
        (
            "sys.stdout = object()\n"
            "try: import megatron.core\nexcept AttributeError: sys.stdout = sys.__stdout__",
            "",
        ),
        ("import megatron.core, importlib; importlib.reload(megatron.core)", "core\nINSTALLED\n"),
    ],
    ids=["looked up", "not found", "found by none", "failed", "imported again"],
)
def test_a_look_or_an_import_that_fails_does_not_lose_the_schedule(tmp_path, before, said) -> None:
    startup_file.activate()
    install = f"{BY_CALL} = lambda **asked: print('INSTALLED')\n"
    printed = run(tmp_path, f"{install}{before}\nimport megatron.core", **ASKED)
    assert printed == said + "core\n" + ("" if "INSTALLED" in said else "INSTALLED\n")


def test_all_arguments_are_read() -> None:
    given = ASKED | {
        "MEGATRON_PP_CHUNKS": "2",
        "MEGATRON_PP_MEMORY_LIMIT": "3.5",
        "MEGATRON_PP_COSTS": "costs.json",
        "MEGATRON_PP_VOCABULARY": "shared",
        "MEGATRON_PP_OFFLOAD": "0.5",
        "MEGATRON_PP_SLICE_TOKENS": "4096",
        "MEGATRON_PP_SLICE_CHECK": "off",
        "MEGATRON_PP_LOSS_RANK": "last",
        "MEGATRON_PP_ORDER": "rule",
        "MEGATRON_PP_TRACE": "trace.json",
        "MEGATRON_PP_TIMEOUT": "10",
        "MEGATRON_PP_UNPROVED": "1",
        "MEGATRON_PP_LOG": "0",
        "MEGATRON_PP_EXT_CACHE": "/somewhere",
    }
    assert given.keys() >= activation.VARIABLES.keys()
    assert activation.arguments(given) == {
        "schedule": "v-half",
        "ranks": 4,
        "microbatches": 32,
        "chunks": 2,
        "memory_limit": 3.5,
        "costs": Path("costs.json"),
        "vocabulary": "shared",
        "offload": "0.5",
        "slice_tokens": 4096,
        "slice_check": "off",
        "loss_rank": "last",
        "order": "rule",
        "trace": Path("trace.json"),
        "timeout": 10.0,
        "unproved": True,
        "log": False,
    }
    assert activation.arguments(ASKED | {"MEGATRON_PP_SLICE_TOKENS": "auto"})["slice_tokens"] == "auto"
    given = ASKED | {"MEGATRON_PP_MEMORY_LIMIT": "0.9-0.8-0.8-0.7"}
    assert activation.arguments(given)["memory_limit"] == "0.9-0.8-0.8-0.7", "one for each rank"


def test_both_doors_at_once_are_refused(tmp_path: Path) -> None:
    program = "from megatron_pp_ext.__main__ import main; main(['script.py'])"
    (tmp_path / "script.py").write_text("")
    program = f"import os; os.chdir({str(tmp_path)!r})\n{program}"
    printed = run(tmp_path, program, **ASKED)
    assert printed.startswith(
        "megatron_pp_ext: MEGATRON_PP_SCHEDULE=v-half is for programs that are started "
    )
    assert printed.count("\n") == 1
