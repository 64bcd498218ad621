"""Patching Megatron: all hooks or none, and nothing changes until a schedule is requested."""

import dataclasses
import functools
import os
import re
import sys
import types
from pathlib import Path

import megatron.core.pipeline_parallel.schedules as schedules
import megatron.training.training as trainer
import pytest
import torch

from megatron_pp_ext.megatron import hooks, install, patching, releases
from megatron_pp_ext.megatron.patching import Place
from megatron_pp_ext.megatron.workarounds import WORKAROUNDS
from tests.support.comparison import assert_same_bits, run

HOOKS = hooks.schedule_hooks()


def is_any_applied() -> bool:
    return any(patching.is_applied(hook) for hook in HOOKS)


REQUESTED = os.environ.get("REQUESTED", "")


@pytest.mark.skipif(not REQUESTED, reason="REQUESTED names no package and version, such as torch==2.11.0")
def test_this_is_the_requested_package():
    name, version = REQUESTED.split("==")
    found = {"megatron-core": releases.megatron_version(), "torch": torch.__version__}
    assert found[name].startswith(version)


@pytest.fixture
def unpatched():
    """Stock Megatron for one test, but for what it cannot train on a CPU without."""
    patching.undo()
    patching.apply(hooks.launch_hooks(cpu=True))
    yield
    patching.undo()
    install(cpu=True)


def test_apply_and_undo(unpatched):
    stock_function = schedules.get_forward_backward_func
    patching.apply(HOOKS)
    assert is_any_applied()
    assert schedules.get_forward_backward_func is not stock_function
    # Importers that took the function by name got the new one too.
    assert trainer.get_forward_backward_func is schedules.get_forward_backward_func
    patched = schedules.get_forward_backward_func
    patching.apply(HOOKS)
    assert schedules.get_forward_backward_func is patched
    patching.undo()
    assert not is_any_applied()
    assert schedules.get_forward_backward_func is stock_function
    assert trainer.get_forward_backward_func is stock_function


def test_modules_of_other_packages_get_the_replacement_too(unpatched, monkeypatch):
    """Modules that took the name before or later get the hook; none is asked for what it imports."""

    def refuse(name):
        raise AssertionError(f"{name} was asked for")

    early, late = types.ModuleType("early"), types.ModuleType("late")
    early.__getattr__ = refuse
    for module in (early, late):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    stock_function = early.another_name = schedules.get_forward_backward_func
    patching.apply(HOOKS)
    assert early.another_name is schedules.get_forward_backward_func is not stock_function
    late.get_forward_backward_func = schedules.get_forward_backward_func
    patching.undo()
    assert early.another_name is late.get_forward_backward_func is stock_function


def test_undo_puts_everything_back(unpatched):
    """Each name, in the class or in all modules that hold it, and a static method as one."""

    class Static:
        @staticmethod
        def method(): ...

    schedules.Static = Static
    static = Place("megatron.core.pipeline_parallel.schedules:Static.method", ("",))
    extra = patching.Hook((static,), lambda stock: print, "a test")
    patching.undo()
    every = [*hooks.all_hooks(cpu=True), extra]
    assert not any(map(patching.is_applied, every))

    def held() -> dict:
        modules = [module for name, module in sys.modules.items() if name.startswith("megatron.")]
        classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
        return {
            (id(holder), name): value
            for holder in (*modules, *classes)
            for name, value in vars(holder).items()
        }

    try:
        before = held()
        patching.apply(every)
        during = held()
        assert len([key for key in before if during.get(key) is not before[key]]) > len(HOOKS)
        patching.undo()
        after = held()
        assert [key[1] for key in before if after.get(key) is not before[key]] == []
        assert isinstance(vars(Static)["method"], staticmethod)
    finally:
        del schedules.Static


@pytest.mark.parametrize("is_there", [True, False])
def test_a_hook_that_does_not_fit_is_refused_whole(unpatched, monkeypatch, is_there):
    def backward_step(input_tensor, output_tensor): ...

    if is_there:
        monkeypatch.setattr(schedules, "backward_step", backward_step)
        problem = r"backward_step takes \(input_tensor output_tensor\) where \(input"
    else:
        monkeypatch.delattr(schedules, "backward_step")
        problem = "backward_step is not there"
    before = schedules.get_forward_backward_func
    with pytest.raises(patching.HookError, match=problem):
        patching.apply(HOOKS)
    assert not is_any_applied()
    assert schedules.get_forward_backward_func is before


def test_a_wrapper_that_fails_leaves_nothing_behind(unpatched):
    def fail(target):
        raise RuntimeError("on purpose")

    first, second = HOOKS[:2]
    before = trainer.get_forward_backward_func
    with pytest.raises(RuntimeError, match="on purpose"):
        patching.apply((first, dataclasses.replace(second, wrap=fail)))
    assert not is_any_applied()
    assert trainer.get_forward_backward_func is before
    # What was applied before stays.
    assert all(patching.is_applied(hook) for hook in hooks.launch_hooks(cpu=True) if hook.here())


@pytest.mark.parametrize("version", ["0.15.3", "0.16.1", "1.17.0", "development"])
def test_an_unknown_release_is_refused_by_name(unpatched, monkeypatch, version):
    """It is refused even if all hooks would fit, since the code behind them was never tried."""
    monkeypatch.setattr("megatron.core.__version__", version)
    with pytest.raises(
        SystemExit, match=f"megatron_pp_ext: megatron-core is {version}, known are 0.17.x"
    ) as end:
        install()
    assert "\n" not in str(end.value)
    assert not is_any_applied()


def test_a_new_parameter_is_refused_until_its_hook_knows_it(unpatched, monkeypatch):
    """The steps of docs/extending.md, for a Megatron that gave one of the patched functions a parameter."""

    def backward_step(input_tensor, output_tensor, output_tensor_grad, config, colour): ...

    monkeypatch.setattr(schedules, "backward_step", backward_step)
    refused = (
        r"schedules\.backward_step takes \(input_tensor output_tensor output_tensor_grad config colour\) "
        r"where \(input_tensor output_tensor output_tensor_grad config\) was known; this is megatron-core "
        rf"{re.escape(releases.own_megatron_version())}, nearest to .*, which was tried: "
    )
    with pytest.raises(patching.HookError, match=refused):
        patching.apply(HOOKS)
    assert not is_any_applied()

    (changed,) = (hook for hook in HOOKS if hook.places[0].name == "backward_step")
    (place,) = changed.places
    parameters = "input_tensor output_tensor output_tensor_grad config colour"
    wider = dataclasses.replace(place, known=(*place.known, parameters))
    updated = dataclasses.replace(changed, places=(wider,))
    patching.apply(updated if hook is changed else hook for hook in HOOKS)
    assert schedules.backward_step is not backward_step
    patching.undo()
    assert schedules.backward_step is backward_step


def test_every_place_that_does_not_fit_is_named(unpatched, monkeypatch):
    monkeypatch.delattr(schedules, "backward_step")
    monkeypatch.delattr(schedules, "forward_step")
    with pytest.raises(patching.HookError, match=r"forward_step is not there; .*backward_step is not"):
        patching.apply(HOOKS)


def test_hooks_are_places_of_their_own():
    every = [place.path for hook in hooks.all_hooks(cpu=True) for place in hook.places]
    assert len({*every}) == len(every)


def test_every_workaround_names_a_test_that_is_there():
    for workaround in WORKAROUNDS:
        file, _, name = workaround.test.partition("::")
        assert f"def {name}" in (Path(__file__).parents[2] / file).read_text(), workaround.test


def test_a_function_may_be_missing_before_it_came(unpatched, monkeypatch):
    no_such = functools.partial(patching.Hook, (Place("megatron.core:no_such_name", ("a b",)),), dict, "")
    monkeypatch.setattr("megatron.core.__version__", "0.17.1")
    patching.apply([no_such((0, 18))])
    for since in ((0, 17), None):
        with pytest.raises(patching.HookError, match="no_such_name is not there"):
            patching.apply([no_such(since)])


def test_where_a_function_has_moved_the_newer_place_is_taken(unpatched):
    def known_in(*paths: str) -> patching.Hook:
        places = tuple(Place(path, ("vp_stage",)) for path in paths)
        return patching.Hook(places, lambda stock: print, "a test")

    parameters = {"new:f": "vp_stage", "old:f": "vp_stage"}
    both = known_in("new:f", "old:f")
    assert both.in_megatron(parameters.get, (0, 19)).path == "new:f"
    assert both.in_megatron({"old:f": "vp_stage"}.get, (0, 17)).path == "old:f"
    with pytest.raises(patching.HookError, match=r"new\.f takes \(colour\)"):
        both.in_megatron({**parameters, "new:f": "colour"}.get, (0, 19))


@pytest.mark.parametrize(
    ("parameters", "fits"),
    [
        ("self config vp_stage logit_dtype", True),
        ("self logit_dtype config vp_stage", True),
        ("config self logit_dtype vp_stage", False),
        ("self config vp_stage", False),
        ("self config vp_stage logit_dtype colour", False),
    ],
)
def test_the_order_counts_as_far_as_the_hook_names_arguments(parameters, fits):
    @patching.hook("a:b", "self config vp_stage logit_dtype", "a test")
    def wrap(stock, model, *args, **kwargs): ...

    (hook,) = wrap.hooks
    if fits:
        hook.in_megatron({"a:b": parameters}.get, (0, 20))
    else:
        with pytest.raises(patching.HookError, match=r"a\.b takes"):
            hook.in_megatron({"a:b": parameters}.get, (0, 20))


def test_without_our_flag_megatron_is_stock(unpatched):
    pipeline = ["--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"]
    truly_stock = run(2, pipeline)
    patching.apply(HOOKS)
    assert_same_bits(run(2, pipeline), truly_stock)
