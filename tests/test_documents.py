"""The documents say what is so: their commands run, and what they name exists."""

import os
import re
import subprocess
import sys
from argparse import ArgumentParser
from functools import cache
from pathlib import Path

import pytest

from megatron_pp_ext.job import flag_table
from megatron_pp_ext.job.flag_table import add_flags
from scripts import refused
from tests.support.documents import (
    COMMANDS,
    DOCUMENTS,
    ELSEWHERE,
    PLACEHOLDER,
    REASONS,
    ROOT,
    Block,
    blocks_of,
    command_blocks,
    prose,
)

LONGEST = 1800
"""Seconds after which a block counts as hanging, also on a machine that is busy with other work."""

SBATCH = """#!/bin/bash
while [[ "$1" == -* ]]; do
    case "$1" in
        --nodes | -N) export SLURM_JOB_NUM_NODES="$2" && shift 2 ;;
        --nodes=*) export SLURM_JOB_NUM_NODES="${1#*=}" && shift ;;
        *=*) shift ;;
        *) shift 2 ;;
    esac
done
exec bash "$@"
"""
"""A stand-in for sbatch, which runs the script here and now."""

OTHERS = {
    "torchrun": "--nproc-per-node --nnodes --node-rank --master-addr --master-port",
    "sbatch and srun": "--nodes --gpus --time --partition --account --gpus-per-node --ntasks-per-node",
    "pyxis": "--container-image --container-mounts --container-workdir --container-save --container-env",
    "srun": "--container-image --container-save --container-workdir --container-env",
    "docker": "--gpus --rm --ipc --shm-size",
    "pip": "--no-build-isolation --no-deps --upgrade --no-index --target",
    "gpu_check": "--out --dry",
    "apex": "--cpp_ext --cuda_ext",
    "benchmarks": "--hidden --ranks --files --real-time --keep",
    "extending": "--pipeline-most-microbatches --pipeline-late-weights",
    "frameworks": "--external_plugins --model --dataset --pipeline_model_parallel_size --config-name "
    "--virtual_pipeline_model_parallel_size --custom-megatron-init-path --use-dynamic-batch-size",
    "slash": "--account-for-embedding --decoder-first",  # --account-for-embedding/loss-in-pipeline-split
}
"""The options of other programs that the documents name."""

BLOCKS = command_blocks()
by_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with links to the project's files, to which a block's own files go."""
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name != "runs":
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def run(block: Block, folder: Path, **environment: str) -> str:
    """Run ``block`` in ``folder`` as pasted into a shell that stops at the first error; its output."""
    nowhere = "http://127.0.0.1:9"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{folder / '.bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "http_proxy": nowhere,
            "https_proxy": nowhere,
            **environment,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST,
    )
    assert done.returncode == 0, f"{block}\n{done.stdout[-4000:]}"
    return done.stdout


@pytest.mark.wide
@pytest.mark.parametrize(
    "block",
    # README's run in environments of their own (scripts/test_first_minutes.py).
    [block for block in BLOCKS if block.reason is None and block.document != ROOT / "README.md"],
    ids=str,
)
def test_commands_run_as_pasted(block: Block, workplace: Path) -> None:
    """With the output that the document shows, in which "..." stands for anything."""
    assert not PLACEHOLDER.search(block.text), "give the block the reason 'placeholders'"
    output = run(block, workplace)
    assert block.missing(output) == [], output[-4000:]


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.reason == "needs SLURM"], ids=str)
def test_jobs_print_their_commands(block: Block, workplace: Path) -> None:
    (workplace / ".bin").mkdir()
    (workplace / ".bin" / "sbatch").write_text(SBATCH)
    (workplace / ".bin" / "sbatch").chmod(0o755)
    assert "srun" in run(block, workplace, DRY_RUN="1")


def test_there_are_commands_and_few_reasons_not_to_run_them() -> None:
    assert sum(block.reason is None for block in BLOCKS) >= 10
    for block in BLOCKS:
        if block.reason is None or block.reason in REASONS:
            continue
        elsewhere = ELSEWHERE.fullmatch(block.reason)
        assert elsewhere, f"{block}: {block.reason!r} is none of {', '.join(REASONS)}"
        assert (ROOT / elsewhere[1]).exists(), block
    assert all(PLACEHOLDER.search(block.text) for block in BLOCKS if block.reason == "placeholders")


@by_document
def test_commands_stand_in_blocks_of_their_own(document: Path) -> None:
    """An indented command would not be run, and neither would one in a block without a name."""
    programs = "mpp|torchrun|sbatch|srun|pip|make|python|git|pytest|bash"
    command = re.compile(rf"^ *(?:\$ )?(?:[A-Z_]+=\S+ )*(?:{programs}) ", re.MULTILINE)
    indented = re.compile(r"\n\n((?: {4}\S.*\n)+)")
    assert not [text for text in indented.findall(prose(document)) if command.match(text)]
    assert not [
        str(block)
        for block in blocks_of(document)
        if block.language not in COMMANDS and command.match(block.text)
    ]


@by_document
def test_links_lead_somewhere(document: Path) -> None:
    """Relative links name files, and what follows # names one of their headings."""
    missing = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose(document)):
        path, _, heading = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (heading and heading not in headings(target)):
            missing.append(link)
    assert not missing


def headings(document: Path) -> set[str]:
    """The names that GitHub gives to the headings of ``document``."""
    found = re.findall(r"^#+ (.*)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@by_document
def test_files_that_are_named_exist(document: Path) -> None:
    """Paths start at the project, the package or the document; Megatron-LM is another project.

    NAME stands for any name.  A file whose text the document gives as an example need not be there.
    """
    text = document.read_text()
    paths = re.findall(r"(?<![\w./-])(?:[\w.-]+/)+[\w.-]+\.(?:py|md|sh|sbatch|patch)\b", text)
    examples = re.findall(r"^`(\S+)`:\n\n```", text, re.MULTILINE)
    missing = [
        path
        for path in dict.fromkeys(paths)
        if not path.startswith("Megatron-LM/")
        and path not in examples
        and not any(
            any(folder.glob(path.replace("NAME", "*")))
            for folder in (ROOT, ROOT / "megatron_pp_ext", document.parent)
        )
    ]
    assert not missing


@cache
def commands() -> dict[str, set[str]]:
    """The options of every command of ``mpp``; those of ``mpp`` itself by the empty name."""
    import typer

    from megatron_pp_ext.cli import app

    group = typer.main.get_command(app)
    options = {
        name: {option for given in command.params for option in (*given.opts, *given.secondary_opts)}
        for name, command in group.commands.items()
    }
    return {"": {option for given in group.params for option in given.opts}, **options}


@cache
def training_flags() -> tuple[frozenset[str], frozenset[str]]:
    """Megatron's flags, by the table that a test compares with its parser, and those of this package."""
    ours = add_flags(ArgumentParser(add_help=False))
    stock, own = (
        frozenset(flag for action in parser._actions for flag in action.option_strings)
        for parser in (flag_table.parser(), ours)
    )
    return stock | {*flag_table.known_flags()}, own


def named(text: str) -> set[str]:
    """The long options in ``text``, which is a document's or a part of one."""
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*\w", text))


@by_document
def test_options_that_are_named_exist(document: Path) -> None:
    stock, ours = training_flags()
    others = {option for options in OTHERS.values() for option in options.split()}
    known = {"--cpu", *stock, *ours, *others, *set().union(*commands().values())}
    code = [block.text for block in blocks_of(document) if block.language in COMMANDS]
    code += re.findall(r"`([^`]+)`", prose(document))
    assert named("\n".join(code)) <= known


@by_document
def test_commands_have_the_options_that_they_are_given(document: Path) -> None:
    text = document.read_text().replace("\\\n", " ")
    for command, words in re.findall(r"\bmpp ([a-z]+)\b([^`\n]*)", text):
        if command in commands():
            given = named(words.partition(" -- ")[0].partition("#")[0])
            assert given <= commands()[command], f"mpp {command}{words}"


def test_all_commands_and_flags_are_described() -> None:
    text = "\n".join(document.read_text() for document in DOCUMENTS)
    _, ours = training_flags()
    assert {flag for flag in ours if not re.search(rf"{flag}\b(?!-)", text)} == set()
    assert {name for name in commands() if f"mpp {name}" not in text} == set()


def test_refusals_are_those_of_the_rules() -> None:
    """Write them anew by ``python -m scripts.refused``."""
    assert refused.FILE.read_text() == refused.text()
