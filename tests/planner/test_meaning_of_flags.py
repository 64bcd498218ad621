"""What flags mean in an estimate: layouts, zeros, and flags that override others."""

import re
import shlex

import pytest

from megatron_pp_ext.job import layers
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner import described

DENSE = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 1 "
    "--max-position-embeddings 1024 --global-batch-size 16 --vocab-size 1000 --bf16 --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope "
    "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
)


def refusal(flags: str) -> str:
    """Return the line that refuses an estimate with ``flags`` on 8 GPUs; empty where there is one."""
    try:
        asked = described.read(shlex.split(flags), None).counted()
        layers.by_stage(asked.job, for_world(asked, 8).finest.stages)
    except ValueError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        ("Et*4|t*3L", r"has 7 layers \(t\), but --num-layers is 8"),
        ("t*4|t*4L", "must begin with its only E"),
        ("Et*4|Et*4L", "must begin with its only E"),
        ("Et*4|t*4", "must end with its only L"),
        ("Et*4L|t*4L", "must end with its only L"),
        ("Et*4|t*4mL", "has 1 m, but --mtp-num-layers is 0"),
        ("Et*4|t*3mtL --mtp-num-layers 1", r"a layer \(t\) after multi-token"),
        ("Et*8m|mL --mtp-num-layers 2", r"\(m\) in 2 stages"),
    ],
)
def test_a_layout_is_that_of_the_model(layout: str, fault: str) -> None:
    assert re.search(fault, refusal(f"{DENSE} --pipeline-model-parallel-layout {layout}"))


@pytest.mark.parametrize(
    "flags",
    [
        "--mtp-num-layers 0",
        "--num-experts 0",
        "--num-query-groups 0",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 0",
        "--moe-router-num-groups 0 --moe-router-group-topk 0",
    ],
)
def test_0_means_none(flags: str) -> None:
    """The job is the one without these flags."""
    jobs = [described.read(shlex.split(f"{DENSE} {words}"), None).counted().job for words in ("", flags)]
    plain, zero = (
        job.changed(recompute_method=None, recompute_num_layers=None, num_query_groups=None) for job in jobs
    )
    assert zero == plain


@pytest.mark.parametrize(
    ("flags", "recomputed"),
    [
        ("--recompute-activations --recompute-granularity full", {"core_attn"}),
        ("--recompute-granularity selective --recompute-modules mlp", {"mlp"}),
    ],
)
def test_flags_that_override_others(flags: str, recomputed: set[str]) -> None:
    """Megatron takes --recompute-activations for selective, whatever --recompute-granularity says."""
    memory = described.read(shlex.split(f"{DENSE} {flags}"), None).counted().job.memory
    assert memory.recomputed == recomputed and not memory.recomputes_layers
