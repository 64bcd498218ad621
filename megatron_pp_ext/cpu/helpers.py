"""Two things that Megatron starts in other processes, and that need not be started.

Neither replaces anything of the training loop, and the first helps on a GPU machine as well.
"""

import importlib
import inspect
from collections.abc import Sequence


def skip_building_dataset_helpers() -> bool:
    """Make the build of the C++ index helpers do nothing where they import; say whether it is skipped.

    Rank 0 runs ``make`` in megatron/core/datasets and exits with status 1 when that fails. The
    megatron-core wheel ships the built helpers but no Makefile, so there it always fails.
    """
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError:
        return False  # a fresh checkout: Megatron has to build them
    utils = importlib.import_module("megatron.core.datasets.utils")
    if not callable(getattr(utils, "compile_helpers", None)):
        raise RuntimeError(
            "megatron.core.datasets.utils has no compile_helpers to skip: "
            "this Megatron-LM is not one of 0.17.1 to 0.19.x; install one of those"
        )
    # The one caller imports it from there each time, so the name is looked up here.
    utils.compile_helpers = lambda: None  # type: ignore[attr-defined]
    return True


def fork_checkpoint_queue(argv: Sequence[str]) -> None:
    """Make the queue through which checkpoint writers report by fork, if ``argv`` saves checkpoints.

    Megatron makes it at the first save, by starting a fresh interpreter in every rank, each of which imports
    the training script and Megatron again: on a CPU shared by the ranks that takes longer than the training
    of a small model. Megatron keeps the first queue that is made, so it is enough to be there before. Called
    before the process groups start their threads, the fork is a safe one.
    """
    if not any(word.partition("=")[0] == "--save" for word in argv):
        return
    writer = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    make = getattr(writer, "get_write_results_queue", None)
    if make is not None and "mp_mode" in inspect.signature(make).parameters:
        make(mp_mode="fork")
