"""A schedule is taken from the cache for the inputs that it was compiled for, and for no others.

Whatever is wrong with a schedule there, it is compiled anew and replaces what was there.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from megatron_pp_ext.compiler import cache
from megatron_pp_ext.compiler import compile as compiling
from megatron_pp_ext.compiler.compile import Compiled, compile_schedule
from megatron_pp_ext.schedule.actions import Action, Copies, Kind
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import linear, v


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGATRON_PP_EXT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def compiled(limit: float = 2) -> Compiled:
    return compile_schedule(2, 4, Costs.unit(v(2)), limit, trials=2)


def changed(**notes: object) -> Callable[[Path], None]:
    """Return the damage by which an entry's notes hold other values."""

    def damage(path: Path) -> None:
        about = path.with_suffix(".json")
        about.write_text(json.dumps(json.loads(about.read_text()) | notes))

    return damage


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return the damage by which something else is where the file was."""

    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def text(content: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(content) and None


def fill(path: Path) -> None:
    path.mkdir()
    (path / "mine").write_text("")


def grow(path: Path) -> None:
    os.truncate(path, 2**40)


NESTED = 100_000
DAMAGE: dict[str, Callable[[Path], None]] = {
    "nested lists": text("[" * NESTED + "]" * NESTED),
    "nested objects": text('{"digest":' * NESTED + "1" + "}" * NESTED),
    "a huge number": text('{"digest": ' + "1" * 5000 + "}"),
    "no object": text("[]"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00") and None,
    "empty": lambda path: path.write_bytes(b"") and None,
    "cut off": lambda path: path.write_text(path.read_text()[:-9]) and None,
    "a terabyte": grow,
    "gone": Path.unlink,
    "a folder": instead(Path.mkdir),
    "a pipe": instead(os.mkfifo),
    "a link to itself": instead(lambda path: path.symlink_to(path)),
    "a link to nothing": instead(lambda path: path.symlink_to("nowhere")),
    "a link to an endless device": instead(lambda path: path.symlink_to("/dev/zero")),
    "another digest": changed(digest="0"),
    "a digest that is no text": changed(digest=[1]),
    "an order that waits for itself": text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"),
    "an order of a million": text("0F0,0B999999\n"),
    "a stage of a million": text("0F0,999999F999999\n"),
}


@pytest.mark.parametrize("file", [".csv", ".json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_replaced(damage: str, file: str, folder: Path) -> None:
    first = compiled()
    (rows,) = folder.glob("*.csv")
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    DAMAGE[damage](rows.with_suffix(file))
    assert cache.load(rows.stem) is None
    assert compiled() == first
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


def test_a_folder_that_is_not_empty_stays(folder: Path) -> None:
    """Nobody knows whose files these are; the schedule is compiled every time."""
    first = compiled()
    (rows,) = folder.glob("*.csv")
    instead(fill)(rows)
    assert compiled() == first
    assert (rows / "mine").exists()


def test_the_entry_of_another_key_is_no_answer(folder: Path) -> None:
    """A valid schedule that keeps the limit, but not the one that is compiled for it."""
    tight = compiled(2)
    (at_tight,) = folder.glob("*.csv")
    loose = compiled(4)
    assert tight.timeline.schedule != loose.timeline.schedule
    (at_loose,) = set(folder.glob("*.csv")) - {at_tight}
    for suffix in (".csv", ".json"):
        shutil.copy(at_tight.with_suffix(suffix), at_loose.with_suffix(suffix))
    assert compiled(4) == loose


def test_a_link_is_replaced_and_not_followed(folder: Path, tmp_path: Path) -> None:
    first = compiled()
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for path in list(folder.iterdir()):
        instead(lambda path: path.symlink_to(mine))(path)
    assert compiled() == first
    assert mine.read_text() == "mine"
    assert not any(path.is_symlink() for path in folder.iterdir())


def test_copies_that_cannot_be_made_are_not_read(folder: Path) -> None:
    """A copy back behind its backward, with the digest of just that."""
    schedule = compiled().timeline.schedule
    for before, is_read in ((Kind.I, True), (Kind.W, False)):
        away = replace(schedule, copies=Copies({(0, 0): Action(0, before, 0)}))
        cache.store("away", away, "")
        assert cache.load("away") == ((away, "") if is_read else None)


STAGE = StageCosts(3, 4, 2, 2, 1)
BASE = {
    "microbatches": 3,
    "costs": Costs((STAGE,) * 4, hop=1, message=0.125),
    "memory_limit": (12.0, 12.0),
    "trials": 1,
}


def with_stage(at: int, **changed: float) -> dict[str, object]:
    stages = [replace(STAGE, **changed) if number == at else STAGE for number in range(4)]
    return {"costs": replace(BASE["costs"], stages=tuple(stages))}


OTHERS = [
    {"microbatches": 4},
    {"trials": 2},
    {"memory_limit": (12.0, 11.0)},
    {"memory_limit": (12.0, 12.0 + 1e-9)},
    {"placements": [linear(2)]},
    {"placements": [v(2)]},
    {"costs": replace(BASE["costs"], hop=1.5)},
    {"costs": replace(BASE["costs"], hop=1 + 1e-12)},
    {"costs": replace(BASE["costs"], message=0.25)},
    with_stage(0, forward=3.5),
    with_stage(1, input_gradient=4.5),
    with_stage(2, weight_gradient=2.5),
    with_stage(3, activation=2.5),
    with_stage(3, released_by_input_gradient=0.5),
]


def test_for_other_inputs_and_of_another_version_a_search_begins(folder: Path, monkeypatch) -> None:
    class Begins(Exception):
        """A search has begun."""

    found = compile_schedule(2, **BASE)
    monkeypatch.setattr(compiling, "_shortest", Mock(side_effect=Begins))
    assert compile_schedule(2, **BASE) == found
    for changed in OTHERS:
        with pytest.raises(Begins):
            compile_schedule(2, **{**BASE, **changed})
    monkeypatch.setattr(compiling, "VERSION", compiling.VERSION + 1)
    with pytest.raises(Begins):
        compile_schedule(2, **BASE)
