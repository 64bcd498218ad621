"""A checkpoint with a file cut short is refused in one line, with the file and the older one that loads."""

import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_pp_ext.integration.workarounds.damaged_checkpoint import refuse_damage
from tests.support.ranks import RankError
from tests.support.training import train

STEPS = ("--pipeline-model-parallel-size", "2", "--num-layers", "4", "--train-iters", "4")
SHARDED = (*STEPS, "--ckpt-format", "torch_dist")
BY_RANK = (*STEPS, "--ckpt-format", "torch", "--use-distributed-optimizer")
ARGS = Namespace(
    rank=0,
    ckpt_format="torch_dist",
    ckpt_step=None,
    no_load_optim=None,
    finetune=False,
    non_persistent_ckpt_type=None,
)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    train(2, [*SHARDED, "--save", str(folder), "--save-interval", "2"])
    return folder


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


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
        ("__0_0.distcp", cut, r"iter_0000004/__0_0.distcp is cut short \(\d+ bytes of \d+\)"),
        ("__0_0.distcp", remove, "iter_0000004/__0_0.distcp is missing"),
        (".metadata", cut, r"iter_0000004/.metadata is damaged \(.*\)"),
        (".metadata", remove, "iter_0000004/.metadata is missing"),
    ],
)
def test_the_file_and_the_older_checkpoint_are_named(
    sharded: Path, tmp_path: Path, file: str, harm: Harm, problem: str
) -> None:
    folder = damaged(sharded, tmp_path, file, harm)
    with pytest.raises(SystemExit) as end:
        refuse_damage(str(folder), ARGS)
    line = str(end.value.code).removeprefix("megatron_pp_ext: ").replace(f"{folder}/", "")
    assert re.fullmatch(problem + re.escape(OLDER), line), line


def test_weights_and_optimizer_of_two_iterations_are_refused(tmp_path: Path) -> None:
    """Megatron takes the step's weights, and what the newest checkpoint has of the rest."""
    train(2, [*BY_RANK, "--save", str(tmp_path), "--save-interval", "2"])
    problem = "--ckpt-step 2 takes the optimizer's state from iteration 4 where --ckpt-format is torch; "
    assert refusal(tmp_path, (*BY_RANK, "--ckpt-step", "2")).startswith(problem)


def test_the_advice_helps_and_changes_nothing(sharded: Path, tmp_path: Path) -> None:
    folder = damaged(sharded, tmp_path, "__1_0.distcp", halve)
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert refusal(folder, SHARDED).endswith("add --ckpt-step 2")
    assert len(train(2, [*SHARDED, "--load", str(folder), "--ckpt-step", "2"])[-1].losses) == 2
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before


def test_only_whole_checkpoints_are_recommended(sharded: Path, tmp_path: Path) -> None:
    folder = damaged(sharded, tmp_path, "__1_0.distcp", halve)
    cut(folder / "iter_0000002" / "__0_0.distcp")
    with pytest.raises(
        SystemExit, match="; no older checkpoint there is whole: put the file back from a copy"
    ):
        refuse_damage(str(folder), ARGS)


def test_what_is_whole_or_loaded_in_part_is_left_to_megatron(sharded: Path, tmp_path: Path) -> None:
    refuse_damage(str(sharded), ARGS)
    folder = str(damaged(sharded, tmp_path, "__1_0.distcp", halve))
    for other in ({"rank": 1}, {"finetune": True}, {"ckpt_format": "torch"}, {"ckpt_step": 2}):
        refuse_damage(folder, Namespace(**{**vars(ARGS), **other}))
