"""Which file of a checkpoint is damaged, and which older checkpoint to load instead.

A disk that was full or a machine that lost power leaves files that are missing, cut short or filled with
zeros.  Loading them fails with errors of torch that name no file.  Nothing on the disk is changed.
"""

import json
import re
import zipfile
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from megatron.training.checkpointing import get_checkpoint_name
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

_TRACKER = "latest_checkpointed_iteration.txt"
_BEGIN, _END, _END_BYTES = b"PK\x03\x04", b"PK\x05\x06", 22
"""How torch.save's archives begin, and how their last bytes do."""


def refuse_damage(folder: str | None, args: Namespace) -> None:
    """End rank 0 with one line if a file of the checkpoint that ``args`` loads from ``folder`` is too short.

    The line has the file and the newest older checkpoint that seems whole.  Only the ranks that need the file
    would fail, some of them while others wait for them.  Where a part is loaded, the rest may be damaged.
    The sizes of the files are compared; no tensor is read before Megatron reads it.
    """
    if args.rank == 0 and not (args.no_load_optim or args.finetune or args.non_persistent_ckpt_type):
        _refuse(folder, args, read=False)


@contextmanager
def name_damage(folder: str | None, args: Namespace) -> Iterator[None]:
    """End the process with the same line if loading from ``folder`` fails within and a file is damaged.

    Every other error passes.
    """
    try:
        yield
    except (Exception, CheckpointException, SystemExit):  # CheckpointException is no Exception.
        _refuse(folder, args, read=True)
        raise


def _refuse(folder: str | None, args: Namespace, read: bool) -> None:
    if folder and (problem := _explain(Path(folder), args, read)):
        raise SystemExit(f"megatron_pp_ext: {problem}")


def _reads_optimizer_by_tracker(args: Namespace) -> bool:
    """Whether Megatron takes the optimizer's state from the newest checkpoint, whatever --ckpt-step says."""
    whole = not (args.no_load_optim or args.finetune)
    return bool(args.ckpt_format == "torch" and args.use_distributed_optimizer and whole)


def refuse_mixed_steps(folder: str | None, args: Namespace) -> None:
    """End rank 0 with one line if --ckpt-step would load weights and optimizer state of two iterations.

    Megatron-LM 0.17 to 0.19 loads them without a word, and goes on from the later iteration.
    """
    step = args.ckpt_step
    if args.rank or not folder or not step or not _reads_optimizer_by_tracker(args):
        return
    tracker = Path(folder, _TRACKER)
    newest = tracker.read_text(errors="replace").strip() if tracker.is_file() else ""
    if newest != str(step):
        raise SystemExit(
            f"megatron_pp_ext: --ckpt-step {step} takes the optimizer's state from iteration {newest} where "
            f"--ckpt-format is torch; write {step} into {tracker} instead"
        )


def _explain(folder: Path, args: Namespace, read: bool) -> str | None:
    """Return what is wrong with the checkpoint that ``args`` loads from ``folder``, and the way out.

    None if all seems well: by the files' sizes or, with ``read``, by both ends of every tensor.
    """
    if args.ckpt_format not in ("torch", "torch_dist"):
        return None
    try:
        tracker = folder / _TRACKER
        chosen = str(args.ckpt_step or "")
        if tracker.is_file():
            text = tracker.read_text(errors="replace").strip()
            if not (text.isdecimal() or text == "release"):
                newest = _newest_whole(folder)
                return f"{tracker} names no iteration; " + (f"write {newest} into it" if newest else _NONE)
            chosen = chosen or text
        if not chosen:
            return None
        found = damage(folder / (f"iter_{int(chosen):07d}" if chosen.isdecimal() else chosen), read)
        if found is None:
            return _missing_here(folder, chosen) if read and args.ckpt_format == "torch" else None
        newest = _newest_whole(folder, int(chosen) if chosen.isdecimal() else None)
    except OSError:
        return None  # Megatron will meet the same.
    by_tracker = _reads_optimizer_by_tracker(args)
    choose = f"write {newest} into {tracker}" if by_tracker else f"add --ckpt-step {newest}"
    older = f"the checkpoint of iteration {newest} is whole: {choose}"
    return f"{found}; {older if newest else _NONE}"


def _missing_here(folder: Path, chosen: str) -> str | None:
    """Say if a checkpoint by rank, the iteration or release ``chosen``, has no file for this rank.

    Megatron would end the run with a success.
    """
    if not dist.is_initialized():  # before that only rank 0's flags are read
        return None
    number = int(chosen) if chosen.isdecimal() else 0
    mine = Path(get_checkpoint_name(str(folder), number, release=not chosen.isdecimal()))
    if mine.exists():
        return None
    return (
        f"{mine} is missing: --ckpt-format torch keeps state rank by rank; go on with the tensor, pipeline "
        "and expert parallel sizes that it was saved with, or save with --ckpt-format torch_dist there"
    )


_NONE = "no older checkpoint there is whole: put the file back from a copy"


def _newest_whole(folder: Path, before: int | None = None) -> int | None:
    """Return the newest iteration before ``before`` whose checkpoint in ``folder`` seems whole."""
    names = (re.fullmatch(r"iter_(\d+)", path.name) for path in folder.iterdir())
    for name in sorted(filter(None, names), key=lambda name: -int(name[1])):
        if (before is None or int(name[1]) < before) and damage(folder / name[0]) is None:
            return int(name[1])
    return None


def damage(checkpoint: Path, read: bool = True) -> str | None:
    """Return what is wrong with the first damaged file of folder ``checkpoint``; None if none seems so.

    With ``read``, both ends of every tensor are read as well, which takes a while in a large checkpoint.
    """
    if not checkpoint.is_dir():
        return f"{checkpoint} is missing"
    by_rank = sorted(checkpoint.glob("mp_rank_*"))
    return _damage_by_rank(by_rank) if by_rank else _damage_sharded(checkpoint, read)


def _damage_by_rank(folders: list[Path]) -> str | None:
    """Look at what --ckpt-format torch writes: a folder for each rank, all with the same files."""
    names = sorted({file.name for folder in folders for file in folder.glob("*.pt")})
    found = (_archive_damage(folder / name) for folder in folders for name in names)
    return next(filter(None, found), None)


def _damage_sharded(checkpoint: Path, read: bool) -> str | None:
    """Look at what --ckpt-format torch_dist writes: .metadata says which bytes of which file hold what."""
    backends, index = checkpoint / "metadata.json", checkpoint / ".metadata"
    for file in (backends, index):
        if not file.exists():
            return f"{file} is missing"
    try:
        has_common_file = "common_backend" in dict(json.loads(backends.read_bytes()))  # before 0.19
    except (ValueError, TypeError) as error:
        return f"{backends} is damaged ({error})"
    ranges = defaultdict(list)
    transformed = False
    try:
        for part in FileSystemReader(checkpoint).read_metadata().storage_data.values():
            ranges[checkpoint / part.relative_path].append((part.offset, part.offset + part.length))
            transformed |= bool(getattr(part, "transform_descriptors", None))  # Compressed: no archives.
    except Exception as error:  # Bytes that are no pickle can raise anything.
        return f"{index} is damaged ({error})"
    if has_common_file and (problem := _archive_damage(checkpoint / "common.pt")):
        return problem
    for file in sorted(ranges):
        problem = _too_short(file, ranges[file])
        if problem is None and read and not transformed:
            problem = _damaged_tensor(file, ranges[file])
        if problem:
            return problem
    return None


def _archive_damage(file: Path) -> str | None:
    if not file.exists():
        return f"{file} is missing"
    return None if zipfile.is_zipfile(file) else f"{file} is damaged (its end is missing)"


def _too_short(file: Path, ranges: list[tuple[int, int]]) -> str | None:
    """Tell whether ``file`` lacks bytes of ``ranges``, each [begin, end)."""
    if not file.exists():
        return f"{file} is missing"
    size, needed = file.stat().st_size, max(end for _, end in ranges)
    return f"{file} is cut short ({size} bytes of {needed})" if size < needed else None


def _damaged_tensor(file: Path, ranges: list[tuple[int, int]]) -> str | None:
    """Tell whether ``file`` has no archive of torch.save in one of ``ranges``, each [begin, end) in bytes."""
    with file.open("rb") as shard:
        for begin, end in sorted(ranges):
            shard.seek(begin)
            first = shard.read(len(_BEGIN))
            shard.seek(end - _END_BYTES)
            if first != _BEGIN or shard.read(len(_END)) != _END:
                return f"{file} is damaged (between bytes {begin} and {end})"
    return None
