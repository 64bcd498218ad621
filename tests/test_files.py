"""Files of ours appear whole or not at all, and nobody foresees where they are written meanwhile."""

import errno
import os
import re
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_pp_ext import files
from megatron_pp_ext.costs import system
from megatron_pp_ext.files import whole, write_whole
from megatron_pp_ext.planner import described
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.formats import costs_file, csv_file, profile, trace_file
from megatron_pp_ext.schedule.formats.profile import Profile, ProfiledLayer
from megatron_pp_ext.schedule.simulate import simulate
from reference import vgg16

SCHEDULE = catalog.build("1f1b", 2, 2)
COSTS = Costs.unit(SCHEDULE.placement)
READERS: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "costs": (lambda path: costs_file.write(COSTS, path), costs_file.read),
    "profile": (
        lambda path: profile.write(Profile.chain([ProfiledLayer("a", 1, 2, 3, 4)]), path),
        profile.read,
    ),
    "graph.txt": (lambda path: path.write_text(vgg16.graph_txt()), profile.read),
    "schedule": (lambda path: csv_file.write(SCHEDULE, path), csv_file.read),
    "system": (
        lambda path: path.write_text(system.read("h100").to_json()),
        lambda path: system.read(str(path)),
    ),
    "model": (
        lambda path: path.write_text('{"num_layers": 4}'),
        lambda path: described.read_model(str(path)),
    ),
    "trace": (lambda path: trace_file.write_timeline(path, simulate(SCHEDULE, COSTS)), trace_file.read),
}
"""What writes a file that a person may edit, and what reads it."""


@pytest.mark.parametrize("kind", READERS)
def test_a_byte_order_mark_is_no_part_of_a_text(kind: str, tmp_path: Path) -> None:
    write, read = READERS[kind]
    write(path := tmp_path / "file.json")
    before = read(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read(path) == before


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (os.mkfifo, "no end|neither a file nor"),
        (lambda path: path.symlink_to(os.devnull), "no end|neither a file nor"),
        (lambda path: path.touch() or os.truncate(path, 2**33), "bytes, but at most"),
    ],
    ids=["pipe", "device", "huge"],
)
def test_what_has_no_end_is_not_read(kind: str, make, problem: str, tmp_path: Path) -> None:
    make(path := tmp_path / "file.jsonl")
    with pytest.raises((OSError, ValueError), match=problem):
        READERS[kind][1](path)


@pytest.fixture(params=[0o022, 0o077, 0o002], ids=oct)
def umask(request: pytest.FixtureRequest):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_mode_is_that_of_open(umask: int, tmp_path: Path) -> None:
    ours, plain = tmp_path / "ours", tmp_path / "plain"
    write_whole(ours, "new")
    plain.write_text("new")
    assert mode(ours) == mode(plain) == 0o666 & ~umask
    ours.chmod(0o640)
    write_whole(ours, "newer")
    assert (mode(ours), ours.read_text()) == (0o640, "newer")


def test_nobody_foresees_the_place(tmp_path: Path) -> None:
    places = []
    for _ in range(2):
        with whole(tmp_path / "a.json") as place:
            place.write_text("")
            places.append(place)
            assert mode(place.parent) == 0o700
    assert places[0] != places[1]
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
    """The place of former releases, for which somebody may have laid a link."""
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / "a.json.part").symlink_to(mine)
    write_whole(tmp_path / "a.json", "ours")
    assert (mine.read_text(), (tmp_path / "a.json").read_text()) == ("mine", "ours")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt(), TypeError()])
def test_after_a_failure_the_old_file_is_there_alone(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(type(error)) as raised, whole(path) as place:
        place.write_text("half of the n")
        raise error
    assert os.listdir(tmp_path) == ["a.json"]
    assert path.read_text() == "old"
    if isinstance(raised.value, OSError):
        assert raised.value.filename == str(path)


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        write_whole(tmp_path / "nowhere" / "a.json", "")
    assert missing.value.filename == str(tmp_path / "nowhere" / "a.json")
    with pytest.raises(IsADirectoryError) as folder:
        write_whole(tmp_path, "")
    assert str(folder.value.filename) == str(tmp_path)
    with pytest.raises(FileNotFoundError) as other, whole(tmp_path / "b.json"):
        (tmp_path / "source").read_text()
    assert Path(other.value.filename).name == "source"
    if Path("/dev/full").exists():  # on Linux
        with pytest.raises(OSError, match="No space left") as full:
            write_whole(Path("/dev/full"), "text")
        assert full.value.filename == "/dev/full"


def test_what_is_no_ordinary_file_is_written_in_its_place(tmp_path: Path) -> None:
    """--json /dev/stdout, a pipe to another program, and a link to where the file should be."""
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_whole(pipe, "through the pipe")
    reader.join()
    assert read == ["through the pipe"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    link.symlink_to(target)
    write_whole(link, "where it points")
    assert link.is_symlink()
    assert target.read_text() == "where it points"
    write_whole(Path("/dev/null"), "nothing")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


PACKAGE = Path(files.__file__).parent
WRITERS = re.compile(r"""\.write_(text|bytes)\(|os\.replace\(|mkstemp\(|open\(.*["'][wax]b?["']""")
IN_PLACE = ('log.open("wb")', 'logs[rank].open("wb")', 'open(job.directory / "lock", "w"')
"""Logs grow while a process runs, and a lock is only locked."""


def test_all_files_of_the_package_are_written_by_this_module() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        for line in path.read_text().splitlines():
            if WRITERS.search(line) and path.name != "files.py":
                assert any(one in line for one in IN_PLACE), f"{path}: {line.strip()}"
