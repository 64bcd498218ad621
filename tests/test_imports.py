"""Rooms know only what is below them, and no modules form a circle.

The sources are parsed, not imported.  An import within a function counts like any other; one for types alone
(``if TYPE_CHECKING``) does not.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "megatron_pp_ext"

PURE = {
    "registered",
    "amounts",
    "around",
    "files",
    "json_input",
    "log_lines",
    "schedule",
    "compiler",
    "features",
    "features.costs",
    "features.planner",
    "costs",
    "job",
    "pipedream.partition",
    "planner",
    "view",
}
"""Rooms that import neither torch nor Megatron."""

MEGATRON = {"integration", "features.megatron", "pipedream", "cpu", "pretrain_gpt", "text_data", "data_split"}
"""Rooms that import Megatron.  text_data is an entry point that writes its data with Megatron's writer."""

_STEPS = {"amounts", "files", "json_input", "registered", "schedule", "compiler", "features", "job"}

BELOW: dict[str, set[str]] = {
    "version": set(),
    "amounts": set(),
    "around": set(),
    "files": set(),
    "json_input": {"files"},
    "log_lines": set(),
    "registered": set(),
    "processor": set(),
    "schedule": {"files", "json_input"},
    "compiler": {"files", "registered", "schedule"},
    "features": {"files", "json_input", "schedule", "compiler", "job"},
    "features.costs": {"schedule", "compiler", "features", "job", "costs"},
    "features.runtime": {"schedule", "features", "runtime"},
    "features.megatron": {
        "schedule",
        "compiler",
        "features",
        "features.runtime",
        "runtime",
        "integration",
        "around",
    },
    "features.planner": {"schedule", "compiler", "features", "features.costs", "job", "planner"},
    "job": {"amounts", "files", "json_input", "registered", "schedule", "compiler"},
    "pipedream": {*_STEPS, "integration", "runtime"},
    "pipedream.partition": _STEPS,
    "costs": _STEPS,
    "planner": {*_STEPS, "features.costs", "costs", "processor"},
    "runtime": {"files", "registered", "schedule"},
    "view": {"files", "json_input", "schedule"},
    "jobs": {"files"},
    "verification": {*_STEPS, "jobs", "runtime"},
    "calibration": {*_STEPS, "costs", "processor"},
    "cpu": {"around"},
    "integration": {
        *_STEPS,
        "startup_file",
        "around",
        "version",
        "log_lines",
        "processor",
        "costs",
        "runtime",
        "cpu",
    },
    "data_split": set(),
    "launch_errors": {"files"},
    "startup_file": {"files"},
    "activation": {"integration", "json_input", "launch_errors", "startup_file"},
    "text_data": {"data_split", "files"},
}
BELOW |= {
    "__init__": {"schedule", "compiler", "features", "integration", "version", "view"},
    "cli": {*BELOW},
    "launch": {"integration", "pipedream", "planner"},
    "__main__": {"activation", "cpu", "launch", "launch_errors"},
    "pretrain_gpt": {"__main__", "cpu", "integration", "data_split", "launch_errors"},
}
"""The rooms that each room may import, itself aside."""

TRAINING = {
    *("schedule", "compiler", "features", "job", "costs", "runtime", "cpu", "integration", "activation"),
    *("features.runtime", "features.megatron"),
}
"""The product that trains.  Others stand on it, and ``launch`` registers what they add to it."""

OTHER_PRODUCTS = {
    *("planner", "calibration", "pipedream", "pipedream.partition"),
    *("view", "verification", "jobs", "cli"),
}

_HOOKS = {"releases", "places", "patching"}

REGISTERS = {
    (f"{PACKAGE}.compiler.__init__", "features"),
    (f"{PACKAGE}.job.__init__", "features"),
    (f"{PACKAGE}.job.rules.table", "features"),
    (f"{PACKAGE}.runtime.__init__", "features.runtime"),
    (f"{PACKAGE}.integration.core_hooks", "features.megatron"),
    (f"{PACKAGE}.costs.choices.__init__", "features.costs"),
    (f"{PACKAGE}.planner.step.__init__", "features.planner"),
    (f"{PACKAGE}.planner.search.__init__", "features.planner"),
}
"""The arrows upwards: who imports the compiler gets the passes of features, which register by it, and who
imports the runtime, the hooks, estimates or searches gets theirs."""

BELOW_IN_INTEGRATION = {
    "releases": set(),
    "places": {"releases"},
    "tried": set(),
    "patching": {"releases", "places", "tried"},
    "settings": set(),
    "registry": {"requested"},
    "step_runners": {"registry", "requested"},
    "requested": {"settings"},
    "start_up": {"requested"},
    "workarounds": _HOOKS,
    "core": {*_HOOKS, "requested"},
    "settled": {"settings", "requested", "core"},
    "runners": {*_HOOKS, "settings", "requested", "step_runners", "settled", "core"},
    "frameworks": {"releases", "patching", "requested", "core"},
    "trainer": {
        *_HOOKS,
        "settings",
        "requested",
        "registry",
        "step_runners",
        "start_up",
        "core",
        "workarounds",
    },
    "core_hooks": {"patching", "core", "runners", "frameworks", "workarounds"},
    "trainer_hooks": {"patching", "trainer"},
    "cpu_hooks": _HOOKS,
    "hooks": {"patching", "core_hooks", "trainer_hooks", "cpu_hooks", "workarounds"},
    "trainers_tried": set(),
    "hooks_here": {*_HOOKS, "tried", "core_hooks", "hooks", "workarounds", "frameworks"},
    "doctor": {"releases", "trainers_tried", "hooks_here"},
    "call_request": {"settings", "requested", "start_up"},
    "by_call": {"call_request", "requested", "patching", "core", "core_hooks"},
    "__init__": {"patching", "hooks"},
}
"""The same for the rooms of ``integration``."""


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
    return frozenset(_named(ast.parse(modules()[module].read_text())))


LAZY = "_HOMES"
"""The table of the public names, each with the module and the name there that it is imported from."""


def _named(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
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
        yield from _named(node)


def _module(name: str) -> str:
    """The module that ``name`` is or is in, as ``modules`` has it."""
    while name.partition(".")[0] == PACKAGE:
        for candidate in (name, f"{name}.__init__"):
            if candidate in modules():
                return candidate
        name = name.rpartition(".")[0]
    return name


def room(module: str, depth: int = 1) -> str:
    """Return the room of ``module``, or at ``depth`` 2 the room within ``integration``.

    Features have a room on each level that they add to, and PipeDream's partitioner is one of its own.
    Their options of commands are in that of commands.
    """
    parts = module.split(".")
    if depth == 1 and parts[1:3] == ["pipedream", "partition"]:
        return "pipedream.partition"
    if depth == 1 and parts[1] == "features" and "cli" in parts[2:]:
        return "cli"
    if depth == 1 and parts[1] == "features":
        return next(
            (f"features.{level}" for level, names in _LEVELS.items() if names & {*parts[2:]}), "features"
        )
    return parts[depth]


_LEVELS = {
    "megatron": {"megatron"},
    "costs": {"costs", "choices"},
    "runtime": {"runtime", "operations"},
    "planner": {"planner", "estimates", "searches"},
}
"""The levels above that of schedules on which features work, by the names of their folders and files."""


def is_ours(module: str) -> bool:
    return module in modules()


def test_the_plan_names_every_room() -> None:
    assert {room(module) for module in modules()} == BELOW.keys()
    within = {room(module, 2) for module in modules() if room(module) == "integration"}
    assert within == BELOW_IN_INTEGRATION.keys()


def arrows(module: str) -> Iterator[tuple[str, str, dict[str, set[str]]]]:
    """From which room to which ``module`` has arrows, and the plan that they are in."""
    for imported in filter(is_ours, imports(module)):
        if room(imported) != room(module):
            yield room(module), room(imported), BELOW
        elif room(module) == "integration" and room(imported, 2) != room(module, 2):
            yield room(module, 2), room(imported, 2), BELOW_IN_INTEGRATION


def test_no_arrow_points_upwards() -> None:
    upwards = [
        f"{module}: {above} knows {below}"
        for module in sorted(modules())
        for above, below, plan in arrows(module)
        if below not in plan[above] and (module, below) not in REGISTERS
    ]
    assert not upwards, "\n".join(upwards)


BY_STRING = {"import_module", "__import__", "find_spec", "run_module", "resolve_name"}
"""The functions that import or look for what a string names."""


def test_training_knows_no_other_product() -> None:
    """Nor does it by way of what it imports; ``integration/test_walls.py`` trains where there is none."""
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


IMPORTS_TRAINER = {
    "integration.workarounds.growing_batches",
    "integration.workarounds.stage_data",
    "integration.__init__",
    "cpu.flags",
    "pretrain_gpt",
}
"""What imports megatron.training outside of ``integration.trainer``: two workarounds of its own defects, the
installation, which waits for it, and what starts it."""


def test_megatrons_trainer_stays_in_its_room() -> None:
    """The core and the runners must do without it, and know its arguments only by their settings."""
    using = {
        module.removeprefix(f"{PACKAGE}.")
        for module in modules()
        if any(name.startswith("megatron.training") for name in imports(module))
    }
    assert {module for module in using if not module.startswith("integration.trainer.")} == IMPORTS_TRAINER


def test_no_circle_of_rooms() -> None:
    for plan in (BELOW, BELOW_IN_INTEGRATION):
        assert not find_circle({room: sorted(below) for room, below in plan.items()})


def test_no_circle() -> None:
    circle = find_circle({module: sorted(filter(is_ours, imports(module))) for module in modules()})
    assert not circle, " -> ".join(circle)


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
        "    from megatron_pp_ext.integration import install\n"
    )
    assert {name for name in _named(ast.parse(source)) if is_ours(name)} == {
        f"{PACKAGE}.schedule.catalog",
        f"{PACKAGE}.files",
        f"{PACKAGE}.integration.__init__",
    }
    assert "torch.nn" in _named(ast.parse(source))


MADE_IN = {
    "compiler.make",
    "compiler.compile",
    "compiler.search.proposals",
    "schedule.catalog",
    "features.__init__",
    "features.units.planner",
    "features.offload.order",
    "features.offload.compiled",
    "features.offload.longer_plans",
    "features.pairs.order",
    "features.vocabulary.order",
}
"""The maker, the catalogue and the compiler that it asks, passes of features, and plans of each step."""

MAKES = {
    "compiler.compile": {"compile_schedule"},
    "features.units.list_scheduling": {"Within"},
    "features.pairs.order": {"compiled", "in_pairs", "paired"},
    "features.offload.compiled": {"planned", "published_orders", "shortest_within"},
    "features.offload.free_plans": {"with_share", "within"},
    "features.offload.longer_plans": {"with_whole_share", "within_limits"},
    "features.offload.order": {"offloaded"},
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
        if module.removeprefix(f"{PACKAGE}.") in MADE_IN:
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
