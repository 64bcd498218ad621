"""What names a release of Megatron agrees with the one table, ``integration/releases.py``."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron_pp_ext.integration.releases import NEWEST, RELEASES, Release
from megatron_pp_ext.job.requested_job import FIRST_ENGINE

ROOT = Path(__file__).parents[1]
PUBLISHED = {release.wheel: release for release in RELEASES if release.wheel}
CHECKOUTS = [release.checkout for release in RELEASES if release.checkout]


def dotted(release: Release) -> str:
    return "{}.{}".format(*release.number)


def requirement(name: str, extra: str = "") -> Requirement:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = project["optional-dependencies"][extra] if extra else project["dependencies"]
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
    assert all(release.wheel for release in RELEASES if release.number <= NEWEST)


def test_pyproject_takes_what_is_tested() -> None:
    """From the oldest wheel that is tested up to the release after the newest."""
    oldest = next(iter(PUBLISHED))
    major, minor = NEWEST
    assert requirement("megatron-core").specifier == SpecifierSet(f">={oldest},<{major}.{minor + 1}")
    assert requirement("transformer-engine", extra="gpu").specifier == SpecifierSet(f">={FIRST_ENGINE}")


def test_the_newest_is_installed_and_the_older_ones_are_in_the_matrix() -> None:
    *older, newest = PUBLISHED
    assert f"\nmegatron-core=={newest}\n" in (ROOT / "requirements.lock").read_text()
    assert f"\nOLDER := {' '.join(older)}\n" in (ROOT / "Makefile").read_text()


def test_each_checkout_has_a_patch() -> None:
    assert {path.name for path in (ROOT / "patches").glob("*.patch")} == {
        f"megatron-{checkout}.patch" for checkout in CHECKOUTS
    }
