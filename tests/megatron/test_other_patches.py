"""Functions that are hooked, and that a stand-in for another plugin changes after or around the hooks."""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_pp_ext.megatron import core_hooks, patching
from megatron_pp_ext.megatron.other_patches import AROUND, IN_PLACE, LATER, OtherPatch, others

STEP = "megatron.core.pipeline_parallel.schedules.get_forward_backward_func"
CHECKS = "megatron.core.transformer.transformer_config.TransformerConfig.__post_init__"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Another plugin, imported from a file of its own."""
    module = ModuleType("other_plugin")
    module.__file__ = "other_plugin.py"
    code = (
        "import functools\n"
        "def step(*args, **kwargs): pass\n"
        "def checked(stock):\n"
        "    @functools.wraps(stock)\n"
        "    def call(*args, **kwargs): return stock(*args, **kwargs)\n"
        "    return call\n"
    )
    exec(compile(code, "other_plugin.py", "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "other_plugin", module)
    return module


def found() -> list[OtherPatch]:
    return others(core_hooks.CORE)


def test_there_are_none_but_this_package_s() -> None:
    assert any(patching.is_applied(hook) for hook in core_hooks.CORE)
    assert found() == []


def test_what_takes_a_hook_s_place_is_named(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "get_forward_backward_func", plugin.step)
    assert OtherPatch(STEP, "other_plugin.step", LATER) in found()


def test_what_wraps_a_hook_is_named(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """``functools.wraps`` gives a function the name and module of what it wraps."""
    wrapped = plugin.checked(TransformerConfig.__post_init__)
    assert wrapped.__module__.startswith("megatron.core")
    monkeypatch.setattr(TransformerConfig, "__post_init__", wrapped)
    assert found() == [OtherPatch(CHECKS, "other_plugin.checked.<locals>.call", AROUND)]


def test_what_was_there_before_the_hooks_is_named(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook is around it, whether it kept Megatron's function or not."""
    hook = next(hook for hook in core_hooks.CORE if hook.places[0].dotted == STEP)

    def install(function: Callable[..., Any]) -> None:
        monkeypatch.setattr(schedules, "get_forward_backward_func", hook.wrap(function))

    stock = functools.wraps(schedules.get_forward_backward_func.__wrapped__)
    install(plugin.step)
    assert found() == [OtherPatch(STEP, "other_plugin.step", IN_PLACE)]
    install(stock(plugin.step))
    assert found() == [OtherPatch(STEP, "other_plugin.step", AROUND)]


def test_a_module_that_holds_another_function_is_named(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.training import training

    monkeypatch.setattr(training, "get_forward_backward_func", plugin.step)
    (patch,) = found()
    where = "megatron.training.training.get_forward_backward_func"
    assert patch == OtherPatch(where, "other_plugin.step", IN_PLACE)


def test_code_from_another_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin may compile a function anew within Megatron's own module."""
    scope = dict(vars(schedules))
    exec(compile("def get_forward_backward_func(): pass", "edited.py", "exec"), scope)
    monkeypatch.setattr(schedules, "get_forward_backward_func", scope["get_forward_backward_func"])
    name = "megatron.core.pipeline_parallel.schedules.get_forward_backward_func of edited.py"
    assert OtherPatch(STEP, name, LATER) in found()
