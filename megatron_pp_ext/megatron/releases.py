"""The releases of Megatron-LM for which this package is made.

A new release of Megatron is one row of ``RELEASES``; ``docs/extending.md`` lists the steps around it.  What
has to agree with the table (the range in pyproject.toml, requirements.lock, the Makefile's matrix, the
documents and patches/) is compared with it by ``tests/test_releases.py``.  A development version has the
number of the release that it leads to: whether the hooks fit it is judged by what stands in their places,
and ``tried`` has the commits of which that is known.
"""

import importlib
import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from megatron_pp_ext.version import needs

Number = tuple[int, int]
"""The first two numbers of a version of megatron-core, which the development before it has, too."""

CORE_0_16: Number = (0, 16)
CORE_0_17: Number = (0, 17)
CORE_0_18: Number = (0, 18)
CORE_0_19: Number = (0, 19)
CORE_0_20: Number = (0, 20)


@dataclass(frozen=True, slots=True)
class Release:
    """A release of Megatron and how far it was tried."""

    number: Number
    wheel: str | None
    """The megatron-core from the package registry on which the tests run; None as long as there is none."""
    checkout: str | None
    """The Megatron-LM whose unmodified pretrain_gpt.py runs in the tests and for which ``patches/`` has a
    patch; None before the release."""
    tried: str
    """How far it was tried, in the words of the table in docs/compatibility.md."""
    by_flags: bool = True
    """Whether it has schedules by flags, too, and not by ``megatron_pp_ext.install`` alone."""


_ON_OLDER = (
    "all of `tests/megatron` (`make test-matrix`), but for what this release cannot do, which is skipped "
    "with the reason; a smoke parity in CI"
)

RELEASES = (
    Release(
        CORE_0_16,
        wheel=None,
        checkout=None,
        tried="by `megatron_pp_ext.install` alone, on [four commits](#commits-that-frameworks-pin)",
        by_flags=False,
    ),
    Release(CORE_0_17, wheel="0.17.1", checkout="0.17.1", tried=_ON_OLDER),
    Release(CORE_0_18, wheel="0.18.2", checkout="0.18.2", tried=_ON_OLDER),
    Release(CORE_0_19, wheel="0.19.2", checkout="0.19.0", tried="the whole suite"),
    Release(
        CORE_0_20,
        wheel=None,
        checkout=None,
        tried="[three commits](#commits-that-frameworks-pin) of August 2026; the unmodified "
        "`pretrain_gpt.py` of 22 August trains and evaluates under 1F1B and ZB-H1 with stock's losses, and "
        "goes on from a checkpoint under V-Half within 1e-6 of them",
    ),
)
"""Every release on which the hooks were tried, oldest first."""

NEWEST = max(release.number for release in RELEASES if release.wheel)
"""The newest release that is in the package registry, on which everything is tested."""


def megatron_version() -> str:
    """Return the version of the Megatron that would be imported, which may be a checkout's.

    ModuleNotFoundError, with the fix, where there is none.
    """
    with suppress(ImportError, AttributeError):
        return str(importlib.import_module("megatron.core").__version__)
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        raise ModuleNotFoundError(needs("megatron"), name="megatron") from None


def own_megatron_version() -> str:
    """Return ``megatron_version`` with the commit that a checkout is at, if it is one.

    Some Megatrons add a commit themselves: that of the git repository around their folder, which for an
    installed wheel is whatever project the virtual environment lies in.
    """
    plain = megatron_version().partition("+")[0]
    try:
        git = ["git", "-C", importlib.import_module("megatron.core").__path__[0]]
        tracked = subprocess.run(
            [*git, "ls-files", "--error-unmatch", "__init__.py"], capture_output=True, check=False
        )
        head = [*git, "rev-parse", "--short=8", "HEAD"]
        commit = subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
    except (ImportError, AttributeError, OSError, subprocess.CalledProcessError):
        return plain
    return f"{plain}+{commit}" if tracked.returncode == 0 else plain


def megatron_release() -> Number:
    """Return the release of the Megatron that would be imported; (0, 0) if its version has no numbers."""
    match = re.match(r"(\d+)\.(\d+)", megatron_version())
    return (int(match[1]), int(match[2])) if match else (0, 0)


def release_here() -> Release | None:
    """Return the row of the Megatron that would be imported; None for one that was never tried."""
    return next((row for row in RELEASES if row.number == megatron_release()), None)
