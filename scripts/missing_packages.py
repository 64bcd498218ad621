"""What a machine lacks for this project: names and versions for pip, one a line.

    python scripts/missing_packages.py LIST

LIST has a package in each line, by its name or as ``pip list`` and ``pip freeze`` print it.  Needs are
followed from this project's dependencies on (pyproject.toml, and pytest), as the packages that are installed
here declare them, and not beyond what LIST has.  stderr tells what LIST has in a version that is refused.
"""

import re
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from tomllib import loads

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parents[1]
TARGET = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": "3.12.0",
    "python_version": "3.12",
    "sys_platform": "linux",
}
"""The machine that the packages are for, by the names of PEP 508."""

_LISTED = re.compile(r"^([A-Za-z0-9][\w.-]*)(?:\s*==\s*|\s+)?(\S*)")


def listed(text: str) -> dict[str, str]:
    """Return the packages of a list with their versions, which are empty where it has none."""
    versions = {}
    for line in text.splitlines():
        if match := _LISTED.match(line.strip()):
            versions[canonicalize_name(match[1])] = match[2]
    return versions


def needed(has: dict[str, str]) -> Iterator[Requirement]:
    """Yield what is needed and not in ``has``, each once and pinned to what is installed here."""
    project = loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    of_training = project["optional-dependencies"]["train"]
    waiting = [Requirement(line) for line in [*project["dependencies"], *of_training, "pytest"]]
    done = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in has:
            _warn(requirement, has[name])
            continue
        if (name, frozenset(requirement.extras)) in done:
            continue
        installed = distribution(name)
        if not any(name == other for other, _ in done):
            yield Requirement(f"{name}=={installed.version}")
        done.add((name, frozenset(requirement.extras)))
        for line in installed.requires or []:
            dependency = Requirement(line)
            marks = [TARGET | {"extra": extra} for extra in ["", *requirement.extras]]
            if dependency.marker is None or any(dependency.marker.evaluate(mark) for mark in marks):
                waiting.append(dependency)


def _warn(requirement: Requirement, version: str) -> None:
    try:
        is_fine = requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return  # the list has none
    if not is_fine:
        print(f"the list has {requirement.name} {version}, but {requirement} is needed", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("give a file that lists the installed packages, as pip list prints them")
    for one in needed(listed(Path(sys.argv[1]).read_text(encoding="utf-8"))):
        print(one)
