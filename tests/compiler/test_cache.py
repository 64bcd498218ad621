"""Whatever is wrong with a schedule in the cache, it is compiled anew and replaces what was there."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_pp_ext.compiler.compile import Compiled, compile_schedule
from megatron_pp_ext.compiler.search import cache
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import v


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
