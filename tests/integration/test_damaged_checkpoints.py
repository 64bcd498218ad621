"""A checkpoint with a damaged file is refused in one line, with the file and the older one that loads."""

import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

from megatron_pp_ext.integration.mends.damaged_checkpoint import damage
from tests.support.ranks import RankError
from tests.support.training import train

STEPS = ("--pipeline-model-parallel-size", "2", "--num-layers", "4", "--train-iters", "4")
SHARDED = (*STEPS, "--ckpt-format", "torch_dist")
BY_RANK = (*STEPS, "--ckpt-format", "torch", "--use-distributed-optimizer")
RANK_1 = "mp_rank_00_001"


def save(folder: Path, flags: tuple[str, ...]) -> Path:
    train(2, [*flags, "--save", str(folder), "--save-interval", "2"])
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("sharded"), SHARDED)


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("by-rank"), BY_RANK)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def fill_with_zeros(file: Path) -> None:
    """What a file system may leave of a file whose last blocks had not reached the disk."""
    file.write_bytes(file.read_bytes()[:-4096] + bytes(4096))


def remove(file: Path) -> None:
    file.unlink()


Harm = Callable[[Path], None]


def damaged(saved: Path, folder: Path, file: str, harm: Harm) -> Path:
    """Copy the checkpoints ``saved`` to ``folder`` and do ``harm`` to one of the newer's files there."""
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    harm(folder / "iter_0000004" / file)
    return folder


def refusal(folder: Path, flags: tuple[str, ...]) -> str:
    """Return the one line in which loading from ``folder`` ends."""
    with pytest.raises(RankError) as failed:
        train(2, [*flags, "--load", str(folder)])
    (line,) = set(re.findall(r"^SystemExit: megatron_pp_ext: (.*)$", str(failed.value), re.MULTILINE))
    return line.replace(f"{folder}/", "")


OLDER = "; the checkpoint of iteration 2 is whole: add --ckpt-step 2"


@pytest.mark.parametrize(
    ("file", "harm", "problem"),
    [
        ("__1_0.distcp", halve, r"iter_0000004/__1_0.distcp is cut short \(\d+ bytes of \d+\)"),
        ("__0_0.distcp", remove, "iter_0000004/__0_0.distcp is missing"),
        (
            "__1_0.distcp",
            fill_with_zeros,
            r"iter_0000004/__1_0.distcp is damaged \(between bytes \d+ and \d+\)",
        ),
        (".metadata", halve, r"iter_0000004/.metadata is damaged \(.*\)"),
        ("../latest_checkpointed_iteration.txt", empty, None),
    ],
    ids=["shard-cut", "shard-missing", "shard-zeroed", "metadata-cut", "tracker-empty"],
)
def test_the_file_and_the_older_checkpoint_are_named(
    sharded: Path, tmp_path: Path, file: str, harm: Harm, problem: str | None
) -> None:
    line = refusal(damaged(sharded, tmp_path, file, harm), SHARDED)
    if problem is None:
        assert line == "latest_checkpointed_iteration.txt names no iteration; write 4 into it"
    else:
        assert re.fullmatch(problem + re.escape(OLDER), line), line


@pytest.mark.parametrize("file", ["model_optim_rng.pt", "distrib_optim.pt"])
def test_files_by_rank_are_named(by_rank: Path, tmp_path: Path, file: str) -> None:
    name = f"iter_0000004/{RANK_1}/{file}"
    line = refusal(damaged(by_rank, tmp_path, f"{RANK_1}/{file}", halve), BY_RANK)
    choose = "write 2 into latest_checkpointed_iteration.txt"
    assert line == f"{name} is damaged (its end is missing); the checkpoint of iteration 2 is whole: {choose}"


def test_weights_and_optimizer_of_two_iterations_are_refused(by_rank: Path) -> None:
    """Megatron takes the step's weights, and what the newest checkpoint has of the rest."""
    problem = "--ckpt-step 2 takes the optimizer's state from iteration 4 where --ckpt-format is torch; "
    assert refusal(by_rank, (*BY_RANK, "--ckpt-step", "2")).startswith(problem)


def test_the_advice_helps_and_changes_nothing(sharded: Path, tmp_path: Path) -> None:
    folder = damaged(sharded, tmp_path, "__1_0.distcp", halve)
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert refusal(folder, SHARDED).endswith("add --ckpt-step 2")
    assert len(train(2, [*SHARDED, "--load", str(folder), "--ckpt-step", "2"])[-1].losses) == 2
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before


def test_only_whole_checkpoints_are_recommended(sharded: Path, tmp_path: Path) -> None:
    folder = damaged(sharded, tmp_path, "__1_0.distcp", halve)
    cut(folder / "iter_0000002" / "__0_0.distcp")
    assert refusal(folder, SHARDED).endswith(
        "; no older checkpoint there is whole: put the file back from a copy"
    )


def test_other_errors_stay_as_they_are(sharded: Path) -> None:
    with pytest.raises(RankError) as failed:
        train(2, [*SHARDED, "--hidden-size", "64", "--load", str(sharded)])
    assert "megatron_pp_ext: " not in str(failed.value)


@pytest.mark.parametrize("harm", [cut, empty, halve, fill_with_zeros, remove])
@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", ".metadata", "metadata.json", "common.pt"])
def test_all_damage_is_found(sharded: Path, tmp_path: Path, file: str, harm: Harm) -> None:
    checkpoint = sharded / "iter_0000004"
    assert damage(checkpoint) is None
    if not (checkpoint / file).exists():
        pytest.skip(f"this Megatron writes no {file}")
    found = damage(damaged(sharded, tmp_path, file, harm) / "iter_0000004")
    assert found is not None
    assert str(tmp_path / "iter_0000004" / file) in found


def test_no_tensor_is_read_before_the_load(sharded: Path, tmp_path: Path) -> None:
    checkpoint = damaged(sharded, tmp_path, "__0_0.distcp", fill_with_zeros) / "iter_0000004"
    assert damage(checkpoint, read=False) is None
    assert "__0_0.distcp is damaged" in (damage(checkpoint) or "")


def test_compressed_tensors_are_not_called_damaged(sharded: Path, tmp_path: Path) -> None:
    """torch's checkpoints may transform what they write; such bytes are not torch.save's archives."""
    checkpoint = damaged(sharded, tmp_path, "__0_0.distcp", fill_with_zeros) / "iter_0000004"
    metadata = FileSystemReader(checkpoint).read_metadata()
    for key, part in metadata.storage_data.items():
        metadata.storage_data[key] = replace(part, transform_descriptors=["stream.zstd"])
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    assert damage(checkpoint) is None


@pytest.mark.parametrize("harm", [cut, empty, halve, fill_with_zeros, remove])
@pytest.mark.parametrize("file", ["model_optim_rng.pt", "distrib_optim.pt"])
def test_all_damage_by_rank_is_found(by_rank: Path, tmp_path: Path, file: str, harm: Harm) -> None:
    assert damage(by_rank / "iter_0000004") is None
    found = damage(damaged(by_rank, tmp_path, f"{RANK_1}/{file}", harm) / "iter_0000004")
    assert found is not None
    assert str(tmp_path / "iter_0000004" / RANK_1 / file) in found
