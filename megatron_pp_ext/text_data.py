"""Turns a folder of text into training data for Megatron-LM, one token a byte; the parts that --split cuts.

    python -m megatron_pp_ext.text_data [SOURCE] PREFIX

SOURCE is a folder or a text file; without one, the Python standard library's own sources are used, which
every machine has. The data go to PREFIX.bin and PREFIX.idx. Bytes are token ids 0 to 255 and 256 ends a
document, so no tokenizer has to be trained or downloaded: Megatron reads the data with

    --data-path PREFIX --tokenizer-type NullTokenizer --vocab-size 257
"""

import argparse
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_pp_ext.files import whole

DEFAULT = "969,30,1"
"""The split that Megatron takes where --split is not given."""

PARTS = ("training", "validation", "test")


def empty_parts(lengths: npt.NDArray[np.int32], split: str) -> list[str]:
    """Return the ``PARTS`` that ``split`` requests and that get no token.

    ``lengths`` are the tokens of each sequence of one data file.

    Megatron cuts a data file by its sequences, of which every document has one or more.  A part that gets
    none of them would make its GPTDataset count tokens for ever.
    """
    # Megatron is imported here, so that what only needs the names above is quick.
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    edges = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    count = len(lengths)
    return [
        part
        for part, edge in zip(PARTS, edges, strict=True)
        # This is how BlendedMegatronDatasetBuilder rounds.
        if edge is not None and not lengths[round(edge[0] * count) : round(edge[1] * count)].sum()
    ]


def working_split(lengths: npt.NDArray[np.int32]) -> str:
    """Return the split nearest to the default that leaves no part empty; with few sequences, of one part."""
    few: Sequence[str] = [f"{len(lengths) - 2},1,1"] if len(lengths) > 2 else []
    for split in (DEFAULT, "98,1,1", "90,5,5", *few):
        if not empty_parts(lengths, split):
            return split
    return "1,0,0"


END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
PIECES = 1100
"""The default split needs half as many, and a piece may be twice as long as it should."""
LONGEST_PIECE = 16 * 1024
SHORTEST_PIECE = 256
TESTS_AND_INSTALLED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class PreparedData:
    """The data that were written, in numbers."""

    documents: int
    tokens: int
    skipped: int  # files that are empty or not text
    split: str  # for --split; the default where that leaves no part empty


class TextDataError(ValueError):
    """The source cannot become training data; the message gives the reason in one line."""


def prepare(source: Path | None, prefix: Path) -> PreparedData:
    """Write the text under ``source`` to ``prefix``.bin and ``prefix``.idx as Megatron's indexed dataset.

    Both files are replaced once the new ones are whole. The indices that Megatron has cached next to data of
    that name are removed; those in another --data-cache-path are not. Each file is a document, of one
    sequence if there are many files, otherwise of as many as the default split needs.
    """
    files, skipped = _text_files(source)
    # Importing Megatron takes seconds, so the checks that do not need it come first.
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    from rich.console import Console
    from rich.progress import track

    dtype = DType.optimal_dtype(VOCAB_SIZE)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    are_enough = working_split(np.ones(len(files), dtype=np.int32)) == DEFAULT
    size = sum(path.stat().st_size for path in files)
    piece = size if are_enough else max(SHORTEST_PIECE, min(LONGEST_PIECE, size // PIECES))
    lengths: list[int] = []
    with whole(Path(f"{prefix}.idx")) as index, whole(Path(f"{prefix}.bin")) as data:
        builder = IndexedDatasetBuilder(str(data), dtype=dtype)
        for path in track(files, description=f"writing {prefix}.bin", console=Console(stderr=True)):
            text = path.read_bytes()
            document = np.append(np.frombuffer(text, dtype=np.uint8).astype(dtype), dtype(END_OF_DOCUMENT))
            sequences = [len(part) for part in _pieces(text, piece)]
            sequences[-1] += 1
            builder.add_document(document, sequences)
            lengths += sequences
        builder.finalize(str(index))
        # Megatron keeps its shuffled order of documents there, and would read the new ones in the old order.
        for indices in prefix.glob("cache/*_indices"):
            shutil.rmtree(indices)
    split = working_split(np.array(lengths, dtype=np.int32))
    return PreparedData(len(files), sum(lengths), skipped, split)


def _text_files(source: Path | None) -> tuple[list[Path], int]:
    """Return the files with text, in an order that does not depend on the disk, and how many others."""
    if source is None:
        candidates = list(_walk(Path(sysconfig.get_paths()["stdlib"]), TESTS_AND_INSTALLED, suffix=".py"))
    elif source.is_dir():
        candidates = list(_walk(source, set()))
    elif source.is_file():
        candidates = [source]
    else:
        raise TextDataError(f"{source} does not exist; give a folder with text files or one text file")
    files = [path for path in candidates if _is_text(path)]
    if not files:
        counts = f"{len(candidates)} files, all empty or binary" if candidates else "no files"
        raise TextDataError(f"no text in {source}: {counts}; give a folder with text files or one text file")
    return files, len(candidates) - len(files)


def _walk(folder: Path, leave_out: set[str], suffix: str = "") -> Iterator[Path]:
    """Yield the files below ``folder``, leaving out hidden ones and the folders named in ``leave_out``."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in leave_out)
        for name in sorted(files):
            path = Path(root, name)
            if not name.startswith(".") and name.endswith(suffix) and path.is_file():
                yield path


def _is_text(path: Path) -> bool:
    """Return whether the file is not empty and has no zero byte near its start, which is git's rule."""
    try:
        with path.open("rb") as file:
            start = file.read(8192)
    except OSError as error:
        raise TextDataError(
            f"{path} cannot be read: {error.strerror}; make it readable or move it"
        ) from error
    return bool(start) and b"\0" not in start


def _pieces(text: bytes, length: int) -> Iterator[bytes]:
    """Cut ``text`` after the first line end after every ``length`` bytes, or else after twice as many.

    Megatron divides training, validation and test data by sequences, and its default --split needs 501 of
    them or more.  So texts in fewer files are stored in several sequences each.  Where a text is too short
    for that, the command prints the --split that works.
    """
    start = 0
    while start < len(text):
        line_end = text.find(b"\n", start + length - 1, start + 2 * length)
        end = start + 2 * length if line_end < 0 else line_end + 1
        yield text[start:end]
        start = end


def main() -> None:
    """Run as a command."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_pp_ext.text_data",
        description="Turn a folder of text or a text file into Megatron-LM training data, one token a byte.",
    )
    parser.add_argument(
        "source", nargs="?", type=Path, help="folder or text file; default: Python's own sources"
    )
    parser.add_argument("prefix", type=Path, help="writes PREFIX.bin and PREFIX.idx")
    arguments = parser.parse_args()
    try:
        done = prepare(arguments.source, arguments.prefix)
    except (TextDataError, OSError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    print(f"{done.documents} documents, {done.tokens} tokens; {done.skipped} files empty or not text")
    split = "" if done.split == DEFAULT else f" --split {done.split}"
    print(
        f"train with: --data-path {arguments.prefix} --tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE}"
        f"{split}"
    )


if __name__ == "__main__":
    main()
