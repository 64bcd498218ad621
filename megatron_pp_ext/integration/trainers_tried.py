"""Which trainers on megatron.core are here, and which versions of them were tried; see docs/frameworks.md."""

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

TRIED: Mapping[str, tuple[str, ...]] = {
    "megatron-bridge": ("0.6.2",),
    "mcore-bridge": ("1.6.5",),
    "ms-swift": ("4.6.0",),
    "verl": ("0.9.1",),
    "nemo-rl": (),
    "slime": (),
}
"""The versions of each distribution under whose loop a test trained; none where its source was only read."""


def here() -> Iterator[tuple[str, str, str]]:
    """Yield name, version and whether that was tried, of every trainer of this environment."""
    for name, tried in TRIED.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        if installed in tried:
            yield name, installed, "yes"
        else:
            yield name, installed, f"no, but {', '.join(tried)} was" if tried else "no, its source was read"
