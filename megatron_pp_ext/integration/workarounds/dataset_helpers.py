"""The C++ index helpers of Megatron's datasets, which a wheel ships built and a checkout has to build."""

import importlib
import shlex
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import megatron.core.datasets
import torch

from megatron_pp_ext.integration.patching import hook
from megatron_pp_ext.integration.workarounds.workaround import EVERY, Workaround

_NEEDED = (
    "make, a C++ compiler and Python's header files (on Ubuntu apt-get install build-essential python3-dev)"
)


WORKAROUND = Workaround(
    "a wheel has the helpers built and no Makefile",
    EVERY,
    "tests/integration/test_dataset_helpers.py::test_a_wheel_has_them_and_nothing_to_build_from",
)


@hook("megatron.core.datasets.utils:compile_helpers", "", WORKAROUND.defect)
def skip_if_built(stock: Callable[[], None]) -> None:
    """Build the helpers only where there are none, as ``build`` does.

    Stock's rank 0 runs ``make`` in megatron/core/datasets and ends the process with status 1 when that fails,
    as it always does in a wheel, which has no Makefile.  Most jobs have built them before, with their flags.
    """
    if not are_built():
        build()
    if not are_built():
        stock()


def are_built() -> bool:
    """Whether this Python can import the helpers."""
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError:
        return False
    return True


def build(folder: Path | None = None) -> None:
    """Build the helpers of the checkout whose megatron/core/datasets is ``folder``, the imported one's.

    Megatron's Makefile requests what it needs from the python3 of the search path, which may be another one
    and lack pybind11.  Here it gets the settings of this Python, and the copy of pybind11 that torch has, or
    else the installed one.  ValueError, in one line, if that fails.
    """
    folder = folder or Path(megatron.core.datasets.__path__[0])
    if not (folder / "Makefile").exists():
        return  # Megatron's own way is left
    headers = _pybind11()
    if headers is None:
        raise ValueError(
            f"the dataset helpers of the checkout cannot be built in {folder} without pybind11, of "
            "which this torch has no copy; install it: pip install pybind11"
        )
    includes = shlex.join([f"-I{headers}", f"-I{sysconfig.get_path('include')}"])
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    command = ["make", "-C", str(folder), f"CPPFLAGS={includes}", f"LIBEXT={suffix}"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        printed = run.stderr.splitlines() if run.returncode else []
    except OSError as error:
        printed = [str(error)]
    if printed:
        problem = next((line for line in printed if "error" in line.lower()), printed[-1])
        raise ValueError(
            f"the dataset helpers of the checkout cannot be built in {folder} ({problem.strip()}); "
            f"install {_NEEDED}"
        )
    importlib.invalidate_caches()


def _pybind11() -> Path | None:
    """Return the folder of pybind11's headers; None if neither torch nor this Python has them."""
    copy = Path(torch.__file__).parent / "include"
    if (copy / "pybind11" / "numpy.h").exists():
        return copy
    try:
        return Path(importlib.import_module("pybind11").get_include())
    except ImportError:
        return None
