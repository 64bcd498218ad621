"""Text to Megatron's indexed dataset, a token a byte."""

import subprocess
import sys
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_pp_ext.text_data import END_OF_DOCUMENT, PIECE, TextDataError, prepare
from tests.support.training import train


def documents(prefix: Path) -> list[bytes]:
    read = []
    for tokens in IndexedDataset(str(prefix)):
        assert tokens[-1] == END_OF_DOCUMENT
        read.append(bytes(tokens[:-1].tolist()))
    return read


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
            losses[name, data] = train(1, flags)[0].losses
    for name in texts:
        assert losses[name, "data"] == losses[name, f"{name} data"]
    assert losses["old", "data"] != losses["new", "data"]
    assert not list(tmp_path.glob("*.part*"))


def test_one_file_is_cut_at_line_ends(tmp_path: Path) -> None:
    text = b"".join(b"line %d\n" % number for number in range(5000)) + b"no line end"
    (tmp_path / "text").write_bytes(text)
    prepare(tmp_path / "text", tmp_path / "data")
    pieces = documents(tmp_path / "data")
    assert b"".join(pieces) == text
    assert len(pieces) == 1 + len(text) // PIECE
    assert all(piece.endswith(b"\n") for piece in pieces[:-1])


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "does not exist"), (b"", "no text in"), (b"\0\1", "no text in")],
)
def test_mistakes_get_one_line(tmp_path: Path, content: bytes | None, problem: str) -> None:
    if content is not None:
        (tmp_path / "source").write_bytes(content)
    with pytest.raises(TextDataError, match=problem) as error:
        prepare(tmp_path / "source", tmp_path / "data")
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("data*"))


def test_the_command(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "megatron_pp_ext.text_data",
        str(tmp_path / "none"),
        str(tmp_path / "out"),
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert (
        run.stderr == f"{tmp_path / 'none'} does not exist; give a folder with text files or one text file\n"
    )


def test_megatron_trains_on_it(tmp_path: Path) -> None:
    prepare(Path(__file__).parent, tmp_path / "data")
    flags = ["--data-path", str(tmp_path / "data"), "--vocab-size", "257", "--split", "100,0,0"]
    (run,) = train(1, flags)
    assert run.losses[-1] < run.losses[0]
