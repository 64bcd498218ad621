"""Stand-ins for packages that frameworks import at their top and that a machine without a GPU cannot have.

A framework names classes of these packages in its own class statements and annotations, and of the few
functions that it calls on the paths that are tested, each may answer None: nothing to do. So every name of a
stand-in is an empty class, made when it is asked for, and a call of it returns None.

    put_in_place()        # from now on `import transformer_engine.pytorch` works

megatron.core asks for some of these packages as well and then uses their layers: it has to have been imported
before, so that it knows them to be absent.
"""

import abc
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

PACKAGES = {
    "transformer_engine": "layers of CUDA kernels",
    "transformer_engine_torch": "their extension",
    "nvidia_resiliency_ext": "restarts of ranks whose GPU fails",
    "modelopt": "quantization",
    "megatron.energon": "multimodal data",
    "ray": "actors on the machines of a cluster",
    "fastapi": "servers of rollouts",
    "uvicorn": "the same",
}
"""The stand-ins by purpose."""


class _Name(abc.ABCMeta):
    """Makes a class any of whose attributes is one more such class, and that stands in annotations."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return empty_class(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.__bases__ != (object,):
            return super().__call__(*args, **kwargs)
        return None if args or not kwargs else lambda decorated: decorated

    def __or__(cls, other: Any) -> Any:
        return object

    __ror__ = __or__


def empty_class(name: str, *bases: type) -> type:
    """Return a class without any behaviour, of which others may be derived."""
    return _Name(name, bases, {})


class _Module(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, attribute := empty_class(name))
        return attribute


class _Packages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages, and all modules within them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.startswith(tuple(PACKAGES)):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def put_in_place() -> None:
    """Let each package that is not installed be imported from now on, as one of empty classes."""
    if not any(isinstance(finder, _Packages) for finder in sys.meta_path):
        sys.meta_path.append(_Packages())  # the last one: it is asked for what no other finds
