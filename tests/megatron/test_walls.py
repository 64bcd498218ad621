"""Training stands alone: it starts and trains where nothing of the other products can be imported."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, sys

BEHIND = {"planner", "pipedream", "view", "verification", "cli", "calibration", "jobs"}

class Wall:
    def find_spec(self, name, path=None, target=None):
        package, _, module = name.partition(".")
        if package == "megatron_pp_ext" and module.partition(".")[0] in BEHIND:
            raise ImportError(f"{name} is behind a wall")

sys.meta_path.insert(0, Wall())

from tests.support import ranks  # the stand-ins for torch.cuda, before Megatron is imported
from tests.support import comparison
from tests.support.few_trials import few_trials
from megatron_pp_ext import launch

launch.install()
common = "--pipeline-model-parallel-size", "2", "--untie-embeddings-and-output-weights"
found = {"stock": comparison.stock(2, *common).losses}
with few_trials(sys.argv[1]):
    for flags in ("1f1b", "v-half", "flex --pipeline-memory-limit 1", "pipedream-2bw"):
        try:
            found[flags] = comparison.run(2, (*common, "--pipeline-schedule", *flags.split())).losses
        except Exception as error:
            found[flags] = str(error)
print(json.dumps(found))
"""


def test_training_needs_no_other_product(tmp_path: Path) -> None:
    """A schedule that never flushes is PipeDream's, and shows that the wall is there."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["1f1b"] == found["v-half"] == found["flex --pipeline-memory-limit 1"] == found["stock"]
    assert len(found["stock"]) == 2
    assert "megatron_pp_ext.pipedream is behind a wall" in found["pipedream-2bw"]
