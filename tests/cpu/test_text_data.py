"""Text to Megatron's indexed dataset, a token a byte."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_pp_ext.text_data import (
    DEFAULT,
    END_OF_DOCUMENT,
    TextDataError,
    empty_parts,
    prepare,
    working_split,
)
from tests.support.ranks import RankError
from tests.support.training import train


def documents(prefix: Path) -> list[bytes]:
    read = []
    for tokens in IndexedDataset(str(prefix)):
        assert tokens[-1] == END_OF_DOCUMENT
        read.append(bytes(tokens[:-1].tolist()))
    return read


def sequences(prefix: Path) -> list[bytes]:
    return [bytes(tokens[tokens < END_OF_DOCUMENT].tolist()) for tokens in IndexedDataset(str(prefix))]


def lines(count: int) -> bytes:
    return b"".join(b"line %d\n" % number for number in range(count)) + b"no line end"


def test_a_folder_gives_a_document_a_file(tmp_path: Path) -> None:
    texts = {"a.txt": b"first\n", "b/c.md": "übung".encode(), "b/d": b"\xff\xfe last"}
    for name, text in {**texts, "empty": b"", "picture": b"\x89\0\0", ".git/head": b"hidden"}.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(text)
    prefix = tmp_path / "out" / "data"
    done = prepare(tmp_path / "in", prefix)
    assert (done.documents, done.skipped) == (3, 2)
    assert done.tokens == sum(len(text) + 1 for text in texts.values())
    assert documents(prefix) == list(texts.values())


def test_other_text_under_the_same_name_is_trained_on(tmp_path: Path) -> None:
    """Megatron keeps its order of the documents by name, whatever they hold."""
    texts = {"old": b"a short text\n" * 90, "new": b"quite another one, and longer\n" * 900}
    losses = {}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
        for data in ("data", f"{name} data"):
            prepare(tmp_path / name, tmp_path / data)
            flags = ["--data-path", str(tmp_path / data), "--vocab-size", "257", "--split", "100,0,0"]
            losses[name, data] = train(1, [*flags, "--global-batch-size", "2"])[0].losses
            assert losses[name, data][-1] < losses[name, data][0]
    for name in texts:
        assert losses[name, "data"] == losses[name, f"{name} data"]
    assert losses["old", "data"] != losses["new", "data"]
    assert not list(tmp_path.glob("*.part*"))


@pytest.mark.parametrize("is_folder", [False, True])
def test_the_default_split_has_all_parts(tmp_path: Path, is_folder: bool) -> None:
    """One file, or a folder with few, is cut at line ends, and only one token a file is added."""
    texts = {"a": lines(20000), "b": b"x" * 50000} if is_folder else {"a": lines(20000)}
    for name, text in texts.items():
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_bytes(text)
    prefix = tmp_path / "data"
    done = prepare(tmp_path / "in" if is_folder else tmp_path / "in" / "a", prefix)
    assert (done.documents, done.split) == (len(texts), DEFAULT)
    assert done.tokens == sum(len(text) + 1 for text in texts.values())
    pieces = sequences(prefix)
    assert b"".join(pieces) == b"".join(texts.values())
    assert sum(piece.endswith(b"\n") for piece in pieces) > 500
    assert not empty_parts(IndexedDataset(str(prefix)).sequence_lengths.copy(), DEFAULT)


def test_a_short_text_gets_the_split_that_works(tmp_path: Path) -> None:
    """And ``pretrain_gpt`` refuses another one, where Megatron would look for tokens for ever."""
    (tmp_path / "in").mkdir()
    for name in "abc":
        (tmp_path / "in" / name).write_bytes(lines(10))
    prefix = str(tmp_path / "data")
    assert prepare(tmp_path / "in", Path(prefix)).split == "1,1,1"
    flags = ["--data-path", prefix, "--vocab-size", "257"]
    with pytest.raises(RankError, match=r"leaves the validation and the test part .* add --split 1,1,1, or"):
        train(1, flags)
    (run,) = train(1, [*flags, "--split", "1,1,1", "--eval-iters", "1", "--eval-interval", "2"])
    assert len(run.validation) > 1


def test_a_split_that_works() -> None:
    """A part that is not requested may be empty."""
    for count, split in (
        (2, "1,0,0"), (3, "1,1,1"), (20, "90,5,5"), (100, "98,1,1"), (500, "98,1,1"), (501, DEFAULT)
    ):  # fmt: skip
        lengths = np.ones(count, dtype=np.int32)
        assert working_split(lengths) == split
        assert not empty_parts(lengths, split)
    assert empty_parts(np.array([5, 5, 5, 5], dtype=np.int32), "99, 1, 0") == ["validation"]


@pytest.mark.parametrize(
    ("content", "problem"), [(None, "does not exist"), (b"", "no text in"), (b"\0\1", "no text in")]
)
def test_mistakes_get_one_line(tmp_path: Path, content: bytes | None, problem: str) -> None:
    if content is not None:
        (tmp_path / "source").write_bytes(content)
    with pytest.raises(TextDataError, match=problem) as error:
        prepare(tmp_path / "source", tmp_path / "data")
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("data*"))


def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_pp_ext.text_data", str(tmp_path / "none"), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    expected = f"{tmp_path / 'none'} does not exist; give a folder with text files or one text file\n"
    assert run.stderr == expected
