"""The C++ index helpers of Megatron's datasets, which a wheel ships built."""

import functools
import importlib
from collections.abc import Callable


def skip_if_built(stock: Callable[[], None]) -> Callable[[], None]:
    """Build the helpers only where there are none.

    Stock's rank 0 runs ``make`` in megatron/core/datasets and ends the process with status 1 when that fails,
    as it always does in a wheel, which has no Makefile.  A fresh checkout has to build them.

    Seam: ``compile_helpers`` in ``megatron.core.datasets.utils``.
    """

    @functools.wraps(stock)
    def compile_helpers() -> None:
        try:
            importlib.import_module("megatron.core.datasets.helpers_cpp")
        except ImportError:
            stock()

    return compile_helpers
