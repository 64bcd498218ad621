"""Rooms know only what is below them, and no modules form a circle.

The sources are parsed, not imported.  An import within a function counts like any other, but for the methods
of a ``features/NAME/feature.py``: these import the levels that the feature adds to, and are the one way up.
One for types alone (``if TYPE_CHECKING``) does not count.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "megatron_pp_ext"

PURE = {
    "setting_error",
    "amounts",
    "around",
    "files",
    "json_input",
    "log_lines",
    "schedule",
    "compiler",
    "features",
    "features.orders",
    "features.costs",
    "features.planner",
    "costs",
    "job",
    "pipedream.pace",
    "pipedream.partition",
    "planner",
    "view",
}
"""Rooms that import neither torch nor Megatron."""

MEGATRON = {"megatron", "features.megatron", "pipedream", "cpu", "pretrain_gpt", "text_data"}
"""Rooms that import Megatron.  text_data is an entry point that writes its data with Megatron's writer."""

_STEPS = {
    *("amounts", "files", "json_input", "setting_error"),
    *("schedule", "compiler", "features.orders", "job"),
}

BELOW: dict[str, set[str]] = {
    "version": set(),
    "amounts": set(),
    "around": set(),
    "files": set(),
    "json_input": {"files"},
    "log_lines": set(),
    "setting_error": set(),
    "processor": set(),
    "schedule": {"files", "json_input"},
    "features": set(),
    "compiler": {"files", "setting_error", "schedule", "features"},
    "job": {
        *("amounts", "files", "json_input", "setting_error", "startup_file", "version"),
        *("schedule", "compiler", "features"),
    },
    "features.orders": {"files", "json_input", "setting_error", "schedule", "compiler", "job"},
    "features.costs": {"setting_error", "schedule", "compiler", "features.orders", "job", "costs"},
    "features.runtime": {"setting_error", "schedule", "features.orders", "runtime"},
    "features.megatron": {
        "schedule",
        "compiler",
        "features.orders",
        "features.runtime",
        "runtime",
        "megatron",
        "around",
        "setting_error",
    },
    "features.planner": {"schedule", "compiler", "features.orders", "features.costs", "job", "planner"},
    "pipedream.pace": {"schedule"},
    "pipedream": {*_STEPS, "megatron", "runtime"},
    "pipedream.partition": _STEPS,
    "costs": _STEPS,
    "planner": {*_STEPS, "pipedream.pace", "features", "features.costs", "costs", "jobs", "processor"},
    "runtime": {"files", "setting_error", "schedule", "features"},
    "view": {"files", "json_input", "schedule"},
    "jobs": {"files"},
    "verification": {*_STEPS, "features", "jobs", "runtime"},
    "calibration": {*_STEPS, "costs", "processor"},
    "cpu": {"around"},
    "megatron": {
        *_STEPS,
        "features",
        "startup_file",
        "around",
        "version",
        "log_lines",
        "processor",
        "costs",
        "runtime",
        "cpu",
    },
    "launch_errors": {"files", "version"},
    "startup_file": {"files"},
    "activation": {"megatron", "json_input", "launch_errors", "startup_file"},
    "text_data": {"files"},
}
BELOW |= {
    "__init__": {"schedule", "compiler", "features.orders", "megatron", "planner", "version", "view"},
    "cli": {*BELOW},
    "launch": {"megatron", "pipedream", "planner"},
    "__main__": {"activation", "cpu", "launch", "launch_errors"},
    "pretrain_gpt": {"__main__", "cpu", "megatron", "text_data", "launch_errors"},
}
"""The packages that each package may import, itself aside."""

TRAINING = {
    *("schedule", "compiler", "features", "job", "costs", "runtime", "cpu", "megatron", "activation"),
    *("features.orders", "features.costs", "features.runtime", "features.megatron"),
}
"""The product that trains.  Others stand on it, and ``launch`` hands it what they add."""

OTHER_PRODUCTS = {
    *("planner", "calibration", "pipedream", "pipedream.pace", "pipedream.partition"),
    *("view", "verification", "jobs", "cli"),
}

BELOW_IN_MEGATRON = {
    "releases": set(),
    "patching": {"releases"},
    "source_files": set(),
    "requested": set(),
    "step_numbers": {"requested"},
    "start_up": {"requested"},
    "workarounds": {"patching", "releases"},
    "core": {"patching", "releases", "requested"},
    "runners": {"core", "patching", "releases", "requested", "step_numbers"},
    "frameworks": {"core", "patching", "releases", "requested", "step_numbers"},
    "trainer": {"core", "patching", "releases", "requested", "start_up", "step_numbers"},
    "core_hooks": {"core", "frameworks", "patching", "runners", "workarounds"},
    "hooks": {"core_hooks", "patching", "releases", "trainer", "workarounds"},
    "other_patches": {"patching"},
    "doctor": {
        *("core_hooks", "frameworks", "hooks", "other_patches", "patching", "releases", "source_files"),
        "workarounds",
    },
    "by_call": {"core", "core_hooks", "patching", "requested", "start_up"},
    "__init__": {"hooks", "patching"},
}
"""The same for the packages and modules of ``megatron``."""


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name; a package goes by its ``__init__``."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in (ROOT / PACKAGE).rglob("*.py")
    }


@cache
def imports(module: str) -> frozenset[str]:
    """What ``module`` imports: modules of the package, others by their full name.

    A module within a package goes by itself, although Python runs the package's ``__init__`` first.
    """
    is_feature = room(module) == "features"
    return frozenset(_named(ast.parse(modules()[module].read_text()), in_functions=not is_feature))


@cache
def runs(module: str) -> frozenset[str]:
    """The modules of the package that Python runs, or has begun to run, where it runs ``module``.

    These are those that it imports outside of functions, and the ``__init__`` of every package on the path
    to them.  The packages that ``module`` itself is in have begun before it; only what is imported from one
    of them by name has to be there.
    """
    parts = module.split(".")
    around = {".".join([*parts[:end], "__init__"]) for end in range(len(parts))}
    named = set(filter(is_ours, _named(ast.parse(modules()[module].read_text()), in_functions=False)))
    packages = {
        package
        for name in named
        for end in range(1, name.count(".") + 1)
        if (package := ".".join([*name.split(".")[:end], "__init__"])) in modules()
    }
    return frozenset(named | (packages - around)) - {module}


LAZY = "_HOMES"
"""The table of the public names, each with the module and the name there that it is imported from."""


def _named(tree: ast.AST, in_functions: bool = True) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and not in_functions:
            continue
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == LAZY:
            homes = ast.literal_eval(node.value).values()
            yield from (_module(f"{PACKAGE}.{module}.{name}") for module, name in homes)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            yield from (_module(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from (_module(f"{node.module}.{alias.name}") for alias in node.names)
        yield from _named(node, in_functions)


def _module(name: str) -> str:
    """The module that ``name`` is or is in, as ``modules`` has it."""
    while name.partition(".")[0] == PACKAGE:
        for candidate in (name, f"{name}.__init__"):
            if candidate in modules():
                return candidate
        name = name.rpartition(".")[0]
    return name


def room(module: str, depth: int = 1) -> str:
    """Return the package of ``module``, or at ``depth`` 2 the part of ``megatron``.

    The table of features counts as a package at the bottom.  What features do counts as one on each level
    that they add to, their options of commands belong to the commands, and the partitioner stands alone.
    """
    parts = module.split(".")
    if depth == 1 and parts[1] == "pipedream" and parts[2:3] in (["pace"], ["partition"]):
        return f"pipedream.{parts[2]}"
    if depth == 1 and parts[1] == "features" and "cli" in parts[2:]:
        return "cli"
    if depth == 1 and parts[1] == "features" and len(parts) < 5 and parts[-1] in ("__init__", "feature"):
        return "features"
    if depth == 1 and parts[1] == "features":
        return f"features.{parts[3]}" if parts[3] in _LEVELS else "features.orders"
    return parts[depth]


_LEVELS = {"costs", "runtime", "megatron", "planner"}
"""The folders of features for the levels above that of schedules."""


def is_ours(module: str) -> bool:
    return module in modules()


def test_the_plan_names_every_room() -> None:
    assert {room(module) for module in modules()} == BELOW.keys()
    within = {room(module, 2) for module in modules() if room(module) == "megatron"}
    assert within == BELOW_IN_MEGATRON.keys()


def arrows(module: str) -> Iterator[tuple[str, str, dict[str, set[str]]]]:
    """From which room to which ``module`` has arrows, and the plan that they are in."""
    for imported in filter(is_ours, imports(module)):
        if room(imported) != room(module):
            yield room(module), room(imported), BELOW
        elif room(module) == "megatron" and room(imported, 2) != room(module, 2):
            yield room(module, 2), room(imported, 2), BELOW_IN_MEGATRON


def test_no_arrow_points_upwards() -> None:
    upwards = [
        f"{module}: {above} knows {below}"
        for module in sorted(modules())
        for above, below, plan in arrows(module)
        if below not in plan[above]
    ]
    assert not upwards, "\n".join(upwards)


BY_STRING = {"import_module", "__import__", "find_spec", "run_module", "resolve_name"}
"""The functions that import or look for what a string names."""


def test_training_knows_no_other_product() -> None:
    """Nor does it by way of what it imports; ``megatron/test_walls.py`` trains where there is none."""
    todo = [module for module in modules() if room(module) in TRAINING]
    reached: set[str] = set()
    while todo:
        module = todo.pop()
        if module not in reached:
            reached.add(module)
            todo += filter(is_ours, imports(module))
    assert not {room(module) for module in reached} & OTHER_PRODUCTS


def test_none_of_our_modules_is_imported_by_a_string() -> None:
    """That would be an arrow which no test sees, but for the public names: ``imports`` reads their table."""
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in BY_STRING:
                text = ast.unparse(node)
                is_ours = re.search(rf"{PACKAGE}|__name__|__package__", text)
                assert module == f"{PACKAGE}.__init__" or not is_ours, f"{module}: {text}"


def test_torch_and_megatron_stay_in_their_rooms() -> None:
    for module in modules():
        heavy = {imported.partition(".")[0] for imported in imports(module)} & {"torch", "megatron"}
        allowed = set() if room(module) in PURE else {"torch", "megatron"}
        if room(module) not in MEGATRON:
            allowed -= {"megatron"}
        assert heavy <= allowed, module


IMPORTS_TRAINER = {"megatron.workarounds", "megatron.__init__", "cpu.flags", "pretrain_gpt"}
"""What imports megatron.training outside of ``megatron.trainer``: a workaround of its own defect, the
installation, which waits for it, and what starts it."""


def test_megatrons_trainer_stays_in_its_room() -> None:
    """The core and the runners must do without it, and know its arguments only by their settings."""
    using = {
        module.removeprefix(f"{PACKAGE}.")
        for module in modules()
        if any(name.startswith("megatron.training") for name in imports(module))
    }
    assert {module for module in using if not module.startswith("megatron.trainer.")} == IMPORTS_TRAINER


def test_no_circle_of_rooms() -> None:
    for plan in (BELOW, BELOW_IN_MEGATRON):
        assert not find_circle({room: sorted(below) for room, below in plan.items()})


def test_no_circle() -> None:
    circle = find_circle({module: sorted(filter(is_ours, imports(module))) for module in modules()})
    assert not circle, " -> ".join(circle)


def test_no_circle_as_python_runs_modules() -> None:
    """Packages included; so no module depends on which other one was imported first."""
    circle = find_circle({module: sorted(runs(module)) for module in modules()})
    assert not circle, " -> ".join(circle)


def test_a_package_runs_before_what_is_in_it() -> None:
    request = f"{PACKAGE}.compiler.request"
    assert {f"{PACKAGE}.schedule.__init__", f"{PACKAGE}.schedule.costs"} < runs(request)
    assert f"{PACKAGE}.compiler.__init__" not in runs(request)
    assert f"{PACKAGE}.features.__init__" in runs(f"{PACKAGE}.compiler.make")


def test_features_are_below_all_others() -> None:
    """Whoever asks for features imports none of what they do."""
    todo, reached = [f"{PACKAGE}.features.__init__"], set[str]()
    while todo:
        reached.add(module := todo.pop())
        todo += runs(module) - reached
    assert {room(module) for module in reached} == {"features"}


def find_circle(imported: dict[str, list[str]]) -> list[str]:
    """Return the modules of one circle, the first of them again at the end; nothing if there is none."""
    done: set[str] = set()

    def search(path: list[str]) -> list[str]:
        *above, module = path
        if module in above:
            return path[above.index(module) :]
        if module not in done:
            for below in imported[module]:
                if circle := search([*path, below]):
                    return circle
            done.add(module)
        return []

    return next((circle for module in imported if (circle := search([module]))), [])


def test_a_circle_is_spelled_out() -> None:
    assert find_circle({"a": ["b"], "b": ["c", "d"], "c": [], "d": ["e"], "e": ["b"]}) == ["b", "d", "e", "b"]
    assert find_circle({"a": ["b", "c"], "b": ["c"], "c": []}) == []


def test_imports_are_found_wherever_they_are() -> None:
    source = (
        "import torch.nn, json\n"
        "from typing import TYPE_CHECKING\n"
        "from megatron_pp_ext.schedule import catalog\n"
        "if TYPE_CHECKING:\n    from megatron_pp_ext.cli import errors\n"
        "def function():\n    from megatron_pp_ext.files import write_whole\n"
        "    from megatron_pp_ext.megatron import install\n"
    )
    assert {name for name in _named(ast.parse(source)) if is_ours(name)} == {
        f"{PACKAGE}.schedule.catalog",
        f"{PACKAGE}.files",
        f"{PACKAGE}.megatron.__init__",
    }
    assert "torch.nn" in _named(ast.parse(source))


MADE_IN = {
    "compiler.make",
    "compiler.compile",
    "compiler.search.proposals",
    "schedule.catalog",
    "features.units.plan",
    "features.offload.order",
    "features.offload.copies",
    "features.pairs.order",
    "features.vocabulary.order",
}
"""The maker, the catalogue and the compiler that it asks, what features' passes call, and plans of steps."""

MAKES = {
    "compiler.compile": {"compile_schedule"},
    "features.units.list_scheduling": {"Within"},
    "features.pairs.order": {"compiled", "in_pairs", "paired"},
    "features.offload.order": {"planned", "published_orders", "shortest_within", "offloaded"},
    "features.offload.copies": {"with_share", "within", "with_whole_share", "within_limits"},
    "features.vocabulary.order": {"shared", "without_frozen_weight"},
    "features.vocabulary.share": {"share", "share_evaluation", "without_weight_gradients"},
    "schedule.catalog": {"build", "forward_only"},
    "schedule.families": {
        "dualpipe_v",
        "evaluation",
        "gpipe",
        "interleaved",
        "one_f_one_b",
        "one_f_one_b_v",
        "v_shape",
        "v_zero_bubble",
        "zero_bubble",
    },
}
"""What makes a schedule or adds to one, by the module that it is in."""


def test_nobody_but_the_maker_puts_a_schedule_together() -> None:
    """Training, commands, estimates and searches call ``compiler.make``; theirs is a request."""
    for module, path in modules().items():
        if module.removeprefix(f"{PACKAGE}.") in MADE_IN or room(module) == "features":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                home = node.module.removeprefix(f"{PACKAGE}.")
                if home in MAKES and module != f"{PACKAGE}.__init__":
                    taken = {alias.name for alias in node.names} & MAKES[home]
                    assert not taken, f"{module} takes {taken} from {home}, but calls compiler.make"
            if isinstance(node, ast.Attribute):
                builds = ast.unparse(node) in ("catalog.build", "catalog.forward_only")
                assert not builds, f"{module} builds a family itself, but calls compiler.make"
