"""What names a release of Megatron agrees with the one table, ``megatron/releases.py``."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron_pp_ext.job.requested_job import FIRST_ENGINE
from megatron_pp_ext.megatron import patching
from megatron_pp_ext.megatron.releases import NEWEST, RELEASES, Release

ROOT = Path(__file__).parents[1]
PUBLISHED = {release.wheel: release for release in RELEASES if release.wheel}
CHECKOUTS = [release.checkout for release in RELEASES if release.checkout]


def dotted(release: Release) -> str:
    return "{}.{}".format(*release.number)


def requirement(name: str, extra: str) -> Requirement:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = project["optional-dependencies"][extra]
    (found,) = (each for each in map(Requirement, stated) if each.name == name)
    return found


def test_the_table_is_in_order() -> None:
    numbers = [release.number for release in RELEASES]
    assert numbers == sorted(set(numbers))
    for release in RELEASES:
        for version in filter(None, (release.wheel, release.checkout)):
            assert version.startswith(f"{dotted(release)}.")
    # What is not published yet comes last: it is newer than what the tests run on.
    assert [release.number for release in RELEASES if release.wheel][-1] == NEWEST
    assert all(release.wheel for release in RELEASES if release.number <= NEWEST and release.by_flags)


def test_pyproject_takes_what_is_tested() -> None:
    """From the development of the oldest release in the table up to what comes after the last.

    A narrower range would let pip replace the Megatron that a framework pins.
    """
    major, minor = RELEASES[-1].number
    taken = SpecifierSet(f">={dotted(RELEASES[0])}.0rc0,<{major}.{minor + 1}")
    assert requirement("megatron-core", extra="train").specifier == taken
    assert all(one.version in taken for one in patching.commits() if one.is_megatron)
    assert requirement("transformer-engine", extra="gpu").specifier == SpecifierSet(f">={FIRST_ENGINE}")


def test_the_newest_is_installed_and_the_older_ones_are_in_the_matrix() -> None:
    *older, newest = PUBLISHED
    assert f"\nmegatron-core=={newest}\n" in (ROOT / "requirements.lock").read_text()
    assert f"\nOLDER := {' '.join(older)}\n" in (ROOT / "Makefile").read_text()


def test_each_checkout_has_a_patch() -> None:
    assert {path.name for path in (ROOT / "patches").glob("*.patch")} == {
        f"megatron-{checkout}.patch" for checkout in CHECKOUTS
    }
    rows = re.findall(r"^\| `(.*)` \| (.*) \|$", (ROOT / "patches" / "README.md").read_text(), re.MULTILINE)
    assert rows == [(f"megatron-{checkout}.patch", f"core_v{checkout}") for checkout in CHECKOUTS]


def _kind(release: Release) -> str:
    return "development" if release.by_flags else "`install` only"


def test_the_page_has_every_commit_that_was_tried() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    section = page.partition("\n### Commits that frameworks pin\n")[2].partition("\n## ")[0]
    for one in patching.commits():
        assert not one.pinned_by or one.commit in section, one


def test_the_documents_say_what_was_tried() -> None:
    compatibility = (ROOT / "docs" / "compatibility.md").read_text()
    table = compatibility.partition("\n| megatron-core | |\n|---|---|\n")[2].partition("\n\n")[0]
    assert table.splitlines() == [
        *(
            f"| {release.wheel or f'{dotted(release)} ({_kind(release)})'} | {release.tried} |"
            for release in reversed(RELEASES)
        ),
        "| others | refused by name |",
    ]
    published = [dotted(release) for release in PUBLISHED.values()]
    assert f"megatron-core {published[0]} to {published[-1]}" in " ".join(compatibility.split())
    by_flags = [dotted(release) for release in RELEASES if release.by_flags]
    by_call = [dotted(release) for release in RELEASES if not release.by_flags]
    range_of_both = f"(megatron-core {by_flags[0]} to {by_flags[-1]}; {', '.join(by_call)} by call)"
    assert range_of_both in (ROOT / "README.md").read_text()
    assert f"\nThe table is for megatron-core {published[-1]}. " in compatibility
    assert f"core_v{', '.join(CHECKOUTS[:-1])} and {CHECKOUTS[-1]} checkouts" in compatibility
    assert f"Transformer Engine layers ({FIRST_ENGINE} or newer)" in compatibility


def test_what_older_releases_run_is_there() -> None:
    for line in (ROOT / "tests" / "smoke.txt").read_text().split():
        assert (ROOT / line.partition("::")[0]).exists(), line
