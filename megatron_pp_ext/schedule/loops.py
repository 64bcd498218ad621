"""The loops that a search repeats: Python that numba compiles to machine code when it first runs."""

import gc
import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, cast

from megatron_pp_ext.files import make_private, user_folder


@contextmanager
def without_collection() -> Iterator[None]:
    """Leave the collector off, unless it was off before: orders have many thousand actions without cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_PACKAGE = Path(__file__).parents[1]

FIRST_TIME = "compiling inner loops for this machine, which takes about ten seconds the first time"
"""Logged by the module of each loop without code; all loops of a package take so long together."""


def part_of_loop[Function: Callable[..., Any]](function: Function) -> Function:
    """Compile ``function`` into each loop that calls it; its module imports numba, if there is one."""
    return function if _numba() is None else cast(Function, _numba().njit(function))


class Loop:
    """A function that is compiled when it is first called with an array; other loops cannot call it.

    Such a loop has one form alone, so that no second one could take other decisions.  Given arrays, it runs
    compiled; given lists, or without numba, it is Python that takes the same decisions about a hundred times
    more slowly, but at once, which is quicker for a single run.

    The code is kept on disk, for each processor and each state of the sources: numba by itself looks at the
    file of a loop, and not at the files that it imports.  Nothing relies on the files.  Code that cannot be
    read is compiled again, and code that cannot be written serves one process.  With NUMBA_DISABLE_JIT=1
    nothing is compiled.  The files are pickles, which run code when they are read: they are read from a
    folder that only the user may write.  Numba is imported by the first loop that is compiled, and not by
    this module.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__doc__ = function.__doc__
        self._function = function
        self._compiled: Any = None
        self._kept_in: Path | None = None
        """The folder of the code, if this process may read and write it."""

    def __call__(self, *arguments: Any) -> Any:
        """Run the function, as Python if its first argument is a list or has lists."""
        first = arguments[0][0] if isinstance(arguments[0], tuple) else arguments[0]
        if isinstance(first, list) or _numba() is None or _numba().config.DISABLE_JIT:
            return self._function(*arguments)
        if self._compiled is None:
            if not _has_code(self._function):
                logging.getLogger(self._function.__module__).info(FIRST_TIME)
            self._compiled, self._kept_in = _kept(self._function)
        try:
            return self._compiled(*arguments)
        except Exception as error:
            if self._kept_in is None or not _is_of_files(error, self._compiled, arguments):
                raise
            shutil.rmtree(self._kept_in, ignore_errors=True)
            self._compiled, self._kept_in = _numba().njit(self._function), None
            return self._compiled(*arguments)


@cache
def _numba() -> Any:
    """Return the compiler, which takes a while to import, or None where it is not installed."""
    try:
        import numba
    except ImportError:
        return None
    return numba


def _is_of_files(error: Exception, compiled: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether ``error`` is one of reading or writing code, and not the loop's own or its compiler's.

    Damaged files have errors of many kinds, but no code comes of them; the loop runs only once there is some.
    """
    if isinstance(error, _numba().core.errors.NumbaError):
        return False
    return isinstance(error, OSError) or tuple(map(_numba().typeof, arguments)) not in compiled.overloads


def _kept(function: Callable[..., Any]) -> tuple[Callable[..., Any], Path | None]:
    """Return ``function`` with its code kept on disk, and where; in memory alone where that cannot be."""
    njit, config = _numba().njit, _numba().config
    folder, before = _folder(_source(function)), config.CACHE_DIR
    try:
        make_private(folder)
        TemporaryFile(dir=folder).close()
    except OSError:  # numba would look for another folder, in which code of older sources or of others may be
        return cast(Callable[..., Any], njit(function)), None
    config.CACHE_DIR = str(folder)
    try:
        return cast(Callable[..., Any], njit(cache=True)(function)), folder
    finally:
        config.CACHE_DIR = before


def _has_code(function: Callable[..., Any]) -> bool:
    """Whether the code of ``function`` is kept on disk, for one type of each argument."""
    index = f"*.{function.__qualname__}-*.nbi"
    return next(_folder(_source(function)).rglob(index), None) is not None


def _source(function: Callable[..., Any]) -> Path:
    return Path(function.__code__.co_filename)


@cache
def _folder(source: Path) -> Path:
    """Return the folder of the code for loops in ``source``: in NUMBA_CACHE_DIR, or else in the user's own.

    It goes by all sources of the package that ``source`` is in.
    """
    import llvmlite.binding as llvm

    package = next((folder for folder in source.parents if folder.parent == _PACKAGE), source.parent)
    state = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        state.update(file.read_bytes())
    config = _numba().config
    for part in (_numba().__version__, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()):
        state.update(part.encode())
    base = Path(config.CACHE_DIR) if config.CACHE_DIR else user_folder() / "loops"
    return base / state.hexdigest()[:16]
