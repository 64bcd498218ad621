"""A checkpoint with a file that is missing or cut short, or of two iterations.

Where a file is cut short only the ranks that need it fail, some of them while others wait for them, with an
error of torch that names no file.  Here rank 0 compares the files' sizes with the checkpoint's own index
before any tensor is read.  Nothing on the disk is changed.
"""

import re
from argparse import Namespace
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader

from megatron_pp_ext.integration.workarounds.workaround import EVERY, Workaround

_TRACKER = "latest_checkpointed_iteration.txt"


def refuse_mixed_steps(folder: str | None, args: Namespace) -> None:
    """End rank 0 with one line if --ckpt-step would load weights and optimizer state of two iterations.

    With --ckpt-format torch and a distributed optimizer Megatron takes the optimizer's state from the newest
    checkpoint, whatever --ckpt-step is, and goes on from there without a word.
    """
    if args.rank or not folder or not args.ckpt_step or args.no_load_optim or args.finetune:
        return
    if args.ckpt_format != "torch" or not args.use_distributed_optimizer:
        return
    newest = _newest(Path(folder))
    if newest != str(args.ckpt_step):
        raise SystemExit(
            f"megatron_pp_ext: --ckpt-step {args.ckpt_step} takes the optimizer's state from iteration "
            f"{newest} where --ckpt-format is torch; write {args.ckpt_step} into {folder}/{_TRACKER} instead"
        )


def refuse_damage(folder: str | None, args: Namespace) -> None:
    """End rank 0 with one line if a file of the torch_dist checkpoint that ``args`` loads is too short.

    The line has the file and the newest older checkpoint that seems whole.  Where a part is loaded, the rest
    may be damaged.
    """
    if args.rank or not folder or args.ckpt_format != "torch_dist":
        return
    if args.no_load_optim or args.finetune or args.non_persistent_ckpt_type:
        return
    step = str(args.ckpt_step or _newest(Path(folder)))
    if not step.isdecimal():
        return  # A release, or a tracker that Megatron refuses.
    paths = filter(lambda path: _ITERATION.fullmatch(path.name), Path(folder).iterdir())
    checkpoints = {int(path.name.removeprefix("iter_")): path for path in paths}
    problem = damage(checkpoints.get(int(step), Path(folder, f"iter_{int(step):07d}")))
    if problem is None:
        return
    older = sorted((number for number in checkpoints if number < int(step)), reverse=True)
    whole = next((number for number in older if damage(checkpoints[number]) is None), None)
    advice = (
        "no older checkpoint there is whole: put the file back from a copy"
        if whole is None
        else f"the checkpoint of iteration {whole} is whole: add --ckpt-step {whole}"
    )
    raise SystemExit(f"megatron_pp_ext: {problem}; {advice}")


_ITERATION = re.compile(r"iter_\d+")


def _newest(folder: Path) -> str:
    """Return what the tracker in ``folder`` names: an iteration, or "release"; nothing if there is none."""
    tracker = folder / _TRACKER
    return tracker.read_text(errors="replace").strip() if tracker.is_file() else ""


def damage(checkpoint: Path) -> str | None:
    """Return which file in the folder of a torch_dist checkpoint is not all there; None if none seems so."""
    index = checkpoint / ".metadata"
    if not index.exists():
        return f"{index} is missing"
    try:
        parts = FileSystemReader(checkpoint).read_metadata().storage_data.values()
    except Exception as error:  # Bytes that are no pickle can raise anything.
        return f"{index} is damaged ({error})"
    needed: dict[Path, int] = {}
    for part in parts:
        file = checkpoint / part.relative_path
        needed[file] = max(needed.get(file, 0), part.offset + part.length)
    for file, end in sorted(needed.items()):
        size = file.stat().st_size if file.exists() else 0
        if size < end:
            return f"{file} is cut short ({size} bytes of {end})" if file.exists() else f"{file} is missing"
    return None


WORKAROUND = Workaround(
    "a checkpoint with a file cut short (some ranks wait for ever), or with --ckpt-step of two iterations",
    EVERY,
    "tests/integration/test_damaged_checkpoints.py",
)
