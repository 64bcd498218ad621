"""Megatron-Bridge's own recipes: evaluated as they are stored, and read by ``mpp estimate``.

Each runs in a process of its own, where packages that recipes import have stand-ins.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from reference.pipelined_recipes import versions
from tests.support import frameworks

frameworks.require("megatron.bridge")

ROOT = Path(__file__).parents[2]
PERFORMANCE = "megatron.bridge.perf_recipes.llama.h100.llama3:llama3_70b_pretrain_64gpu_h100_bf16_config"

ESTIMATE = """
import sys
from pathlib import Path
from scripts import bridge_recipes
from megatron_pp_ext.cli import app

bridge_recipes.prepare(Path(sys.argv.pop(1)))
app(sys.argv[1:], prog_name="mpp")
"""


def run(*words: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_recipes_are_stored_as_they_are(tmp_path: Path) -> None:
    """Store them anew by ``python -m scripts.bridge_recipes --configs FOLDER``.

    Of models whose config.json only such a folder has, only the name is compared.
    """
    run("-m", "scripts.bridge_recipes", "--folder", tmp_path)
    (file,) = tmp_path.iterdir()
    stored = versions()[0]
    content = json.loads(file.read_text())
    assert (content["version"], content["evaluated"]) == (stored.version, stored.evaluated)
    assert content["not_evaluated"] == stored.not_evaluated
    rows = {row["recipe"]: row for row in content["recipes"]}
    assert rows.keys() == {recipe.recipe for recipe in stored.recipes}
    compared = [recipe for recipe in stored.recipes if rows[recipe.recipe]["without_config"] is None]
    assert len(compared) > len(rows) / 2
    for recipe in compared:
        arguments = content["of_all"] | rows[recipe.recipe]["arguments"]
        assert arguments == dict(recipe.arguments), recipe.recipe


def test_estimate_reads_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "estimate.json"
    flags = ("--pipeline-schedule", "v-half", "--pipeline-model-parallel-layout", "auto")
    printed = run("-c", ESTIMATE, tmp_path, "estimate", "--recipe", PERFORMANCE, "--json", file, "--", *flags)
    assert "v-half on 64 x h100" in " ".join(printed.split())
    assert "megatron_pp_ext.install('v-half', ranks=4" in printed
    content = json.loads(file.read_text())
    assert content["gpus"] == 64
    assert content["settings"]["pipeline_model_parallel_layout"].startswith("Et")
