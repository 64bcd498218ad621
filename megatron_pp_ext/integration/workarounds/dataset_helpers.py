"""The C++ index helpers of Megatron's datasets, which a wheel ships built and a checkout has to build."""

import importlib
from collections.abc import Callable

from megatron_pp_ext.integration.patching import hook
from megatron_pp_ext.integration.workarounds.workaround import EVERY, Workaround

WORKAROUND = Workaround(
    "a wheel has the helpers built and no Makefile",
    EVERY,
    "tests/integration/test_dataset_helpers.py",
)


@hook("megatron.core.datasets.utils:compile_helpers", "", WORKAROUND.defect)
def skip_if_built(stock: Callable[[], None]) -> None:
    """Build the helpers only where this Python cannot import them.

    Stock's rank 0 runs ``make`` in megatron/core/datasets and ends the process with status 1 when that fails,
    as it always does in a wheel, which has no Makefile.
    """
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError:
        stock()
