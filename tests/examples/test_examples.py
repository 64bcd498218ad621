"""The examples: the one for a laptop runs; Megatron accepts the flags of the others, whose models fit."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from megatron_pp_ext import activation
from megatron_pp_ext.cli import app
from megatron_pp_ext.costs import system
from megatron_pp_ext.megatron import by_call
from tests.support.flags import validated

EXAMPLES = Path(__file__).parents[2] / "examples"
GPUS = {"llama3_8b_8gpus.sh": 8, "llama3_70b_64gpus.sh": 64, "mixtral_8x7b_32gpus.sh": 32}
ON_GPUS = pytest.mark.parametrize("name", GPUS)


def printed(name: str, settings: dict[str, str], *arguments: str) -> list[str]:
    """The words that the example prints in a dry run."""
    environment = {"PATH": os.environ["PATH"], "CONTAINER": "image:1", "DRY_RUN": "yes", **settings}
    shown = subprocess.run(
        [EXAMPLES / name, *arguments], env=environment, capture_output=True, text=True, check=True
    )
    return shlex.split(shown.stdout.replace("\\\n", ""))


def flags(words: list[str]) -> list[str]:
    """What stands behind the package's training script."""
    return words[words.index("megatron_pp_ext.pretrain_gpt") + 1 :]


@pytest.mark.parametrize(
    ("name", "settings", "schedule"),
    [
        ("llama3_8b_8gpus.sh", {}, "v-zb"),
        ("llama3_70b_64gpus.sh", {}, "v-half"),
        ("mixtral_8x7b_32gpus.sh", {}, "v-zb"),
        ("llama3_8b_8gpus.sh", {"MEMORY_LIMIT": "0.8"}, "flex"),
    ],
)
def test_megatron_accepts_the_flags(
    name: str, settings: dict[str, str], schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Grouped kernels for experts need a GPU that has them.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    args, request = validated(flags(printed(name, settings)), GPUS[name])
    assert request is not None and request.schedule == schedule
    used = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.data_parallel_size
    assert used == GPUS[name]


@ON_GPUS
def test_the_model_fits(name: str, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    words = ["estimate", "--no-ask", "--system", "h100", "--world-size", GPUS[name], "--json", found, "--"]
    shown = CliRunner().invoke(app, [*map(str, words), *flags(printed(name, {}))])
    assert shown.exit_code == 0, shown.output
    machine = system.read("h100")
    content = json.loads(found.read_text())
    ranks = [sum(rank.values()) for rank in content["ranks"]]
    assert max(ranks) < 0.9 * machine.memory_bytes
    # The table in README.md has these numbers.
    row = next(
        line for line in (EXAMPLES / "README.md").read_text().splitlines() if line.startswith(f"| {name}")
    )
    assert f"{max(ranks) / 1e9:.1f} GB" in row
    assert f"{content['step_seconds']:.4g} s" in row and f"{content['bubble']:.1%}" in row
    stock = content["compared"]["stock"]
    assert f"{stock['step_seconds']:.4g} s, {stock['fullest_bytes'] / 1e9:.1f} GB" in row
    assert content["step_seconds"] < stock["step_seconds"] and not content["compared"]["warnings"]


@ON_GPUS
def test_settings_reach_the_command(name: str) -> None:
    own = {"DATA": "my data", "TOKENIZER": "my tokenizer", "OUT": "my runs"}
    words = printed(name, own, "--seed", "7")
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in words
    text = "\n".join(words)
    assert (
        "--data-path\nmy data\n--tokenizer-type\nHuggingFaceTokenizer\n--tokenizer-model\nmy tokenizer"
        in text
    )
    assert "--mock-data" not in words
    assert "--save\nmy runs/checkpoints" in text
    assert "--seed\n7" in text


def test_data_need_their_tokenizer() -> None:
    with pytest.raises(subprocess.CalledProcessError) as error:
        printed("mixtral_8x7b_32gpus.sh", {"DATA": "data"})
    assert "TOKENIZER: has to name the Hugging Face tokenizer that made DATA" in error.value.stderr


def test_jobs_of_several_nodes_are_in_their_container() -> None:
    words = printed("llama3_70b_64gpus.sh", {})
    assert {"--nodes=8", "--container-image=image:1"} <= set(words)
    assert "--nodes=4" in printed("mixtral_8x7b_32gpus.sh", {})


@pytest.mark.parametrize(
    ("name", "settings", "schedule", "script"),
    [
        (
            "verl.sh",
            {"VERL": "/verl"},
            ("flex", 1.0, 2),
            "/verl/examples/grpo_trainer/run_qwen3_8b_megatron.sh",
        ),
        (
            "ms_swift.sh",
            {"SWIFT": "/swift"},
            ("flex", 1.0, 1),
            "/swift/examples/megatron/mcore_bridge/full/moe.sh",
        ),
        (
            "nemo_rl.sh",
            {"NEMO_RL": "/nemo"},
            ("zb-h1", None, 1),
            "examples/configs/grpo_math_70B_megatron.yaml",
        ),
    ],
)
def test_other_trainers_get_variables_that_install_reads(
    name: str, settings: dict[str, str], schedule: tuple[str, float | None, int], script: str
) -> None:
    words = printed(name, settings)
    assert script in words
    variables = dict(word.split("=", 1) for word in words if word.startswith("MEGATRON_PP_"))
    request = by_call.read(**activation.arguments(variables)).request
    assert (request.schedule, request.limit, request.finest.chunks) == schedule


def test_two_chunks_get_verls_overrides() -> None:
    words = printed("verl.sh", {"VERL": "/verl"}, "trainer.total_epochs=1")
    assert "actor_rollout_ref.ref.megatron.virtual_pipeline_model_parallel_size=2" in words
    assert words[-1] == "trainer.total_epochs=1"
    one = printed("verl.sh", {"VERL": "/verl", "SCHEDULE": "zb-h1", "CHUNKS": "1"})
    assert one[-1].endswith("run_qwen3_8b_megatron.sh") and "MEGATRON_PP_SCHEDULE=zb-h1" in one


def test_slimes_script_gets_two_flags_more(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("MISC_ARGS=(\n   --attention-backend flash\n)\n")
    settings = {"SLIME": str(tmp_path), "SCRIPT": "run.sh", "MICROBATCHES": "7"}
    words = printed("slime.sh", settings)
    assert words[words.index("--custom-megatron-init-path") + 1] == "slime_hook.install"
    variables = json.loads(words[words.index("--train-env-vars") + 1])
    assert (variables["PIPELINE_SCHEDULE"], variables["PIPELINE_MICROBATCHES"]) == ("flex", "7")
    assert Path(variables["PYTHONPATH"].split(":")[0], "slime_hook.py").exists()
    script.write_text("python train.py\n")
    with pytest.raises(subprocess.CalledProcessError) as error:
        printed("slime.sh", settings)
    assert "has no line that begins with MISC_ARGS=(" in error.value.stderr


@pytest.mark.wide
def test_the_laptop_trains_on_own_text_and_goes_on(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(4):
        (text / f"{number}.txt").write_text(
            "".join(f"{number} and {n} are {number + n}.\n" for n in range(500))
        )
    out = tmp_path / "out"
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(out), "STEPS": "4"}
    command = [EXAMPLES / "laptop.sh", text]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    # The second start begins where the first one saved.
    assert "at iteration 2" in (out / "second-half.log").read_text()
    losses = [float(loss) for loss in re.findall(r"validation set .*?value: (\S+)", done.stdout)]
    assert losses and all(0 < loss < 10 for loss in losses)  # 5.5 is a guess among 257 tokens
    assert (out / "step.png").read_bytes().startswith(b"\x89PNG")
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 2 and "delete it, or set OUT to another folder" in again.stderr


@pytest.mark.wide
def test_the_python_api(tmp_path: Path) -> None:
    script = EXAMPLES / "python_api.py"
    assert len(script.read_text().splitlines()) <= 30
    command = [sys.executable, str(script), "steps.png"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    lengths = {
        name: float(length) for name, length in re.findall(r"^(\S+) +([\d.]+) ms", shown, re.MULTILINE)
    }
    assert lengths["compiled"] <= lengths["V-Half"] < lengths["1F1B"]
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_every_example_is_in_the_table() -> None:
    table = (EXAMPLES / "README.md").read_text()
    files = [file.name for file in EXAMPLES.iterdir() if file.suffix in (".sh", ".py", ".ipynb")]
    assert len(files) >= 6
    assert [name for name in files if f"[{name}]({name})" not in table] == []
