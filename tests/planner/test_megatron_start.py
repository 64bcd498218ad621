"""What is estimated is what Megatron starts: drawn flags are accepted and refused alike.

What Megatron says stands in reference/megatron_start.json, which scripts/start_table.py writes.
"""

import json
import re
import shlex
from pathlib import Path

import pytest

from megatron_pp_ext.job import layers
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner import described

TABLE = json.loads(Path("reference", "megatron_start.json").read_text(encoding="utf-8"))
DENSE = TABLE["models"]["dense"]

DELIBERATE = {
    "costs that are not modelled": "the planner does not support ",
    "models that Megatron starts and cannot train": "--transformer-impl local does not support ",
    "sizes of 0 of parts that the model may lack": "the model has --.* 0, but it must be ",
    "more layers on the first or last rank than there are": "make [0-9]+ layers, but --num-layers is",
    "state in fewer bits, which Megatron refuses when it makes the optimizer": (
        "--(exp-avg|exp-avg-sq|main-params|main-grads)-dtype is for --use-precision-aware-optimizer"
    ),
    "FP8 that has no effect, or no rate": "--fp8-format (with weights in fp32|has no effect) ",
}
"""What is refused here though Megatron starts, by the reason."""

STARTED = {
    "the order of stock's chunks, which pairs need, is asked of the schedule": (
        "If enabling EP A2A overlap, virtual_pipeline_model_parallel_size must be specified"
    ),
    "the environment, which the printed command leaves alone for FSDP": (
        "FSDP requires CUDA_DEVICE_MAX_CONNECTIONS > 1 or unset"
    ),
}
"""What is estimated though Megatron does not start, by the reason."""


def refusal(flags: str) -> str:
    """Return the line that refuses an estimate with ``flags``; empty where there is one."""
    try:
        asked = described.read(shlex.split(flags), None).counted()
        layers.by_stage(asked, for_world(asked, TABLE["world"]).finest.stages)
    except ValueError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


def test_estimates_accept_what_megatron_starts_with() -> None:
    different = []
    for model, flags, theirs in TABLE["rows"]:
        ours = refusal(f"{TABLE['models'][model]} {flags}")
        known = STARTED.values() if theirs else DELIBERATE.values()
        if bool(ours) != bool(theirs) and not any(re.search(one, ours or theirs) for one in known):
            different.append(f"{model}: {flags}: {theirs or ours}")
    assert not different


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


DELTA_NETS = (
    "--transformer-impl transformer_engine --experimental-attention-variant gated_delta_net "
    "--linear-attention-freq 4"
)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--cp-comm-type a2a+p2p", "give their sizes as --hierarchical-context-parallel-sizes"),
        ("--cp-comm-type p2p a2a+p2p", "give their sizes as --hierarchical-context-parallel-sizes"),
        ("--cp-comm-type a2a+p2p --context-parallel-size 2 --hierarchical-context-parallel-sizes 2 1", ""),
        (f"{DELTA_NETS} --linear-num-value-heads 24", "24 is no multiple of --linear-num-key-heads 16"),
        (f"{DELTA_NETS} --linear-num-value-heads 48", ""),
        ("--linear-num-value-heads 24", ""),
        (
            f"{DELTA_NETS} --linear-num-key-heads 2 --context-parallel-size 2",
            "--linear-num-key-heads 2 is no multiple of --tensor-model-parallel-size 2 x "
            "--context-parallel-size 2",
        ),
    ],
)
def test_what_megatron_asserts_of_its_arguments(flags: str, line: str) -> None:
    """By validate_args and TransformerConfig of 0.17 to 0.19."""
    found = refusal(f"{DENSE} {flags}")
    assert line in found if line else not found


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
    jobs = [described.read(shlex.split(f"{DENSE} {words}"), None).counted() for words in ("", flags)]
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
    memory = described.read(shlex.split(f"{DENSE} {flags}"), None).counted().memory
    assert memory.recomputed == recomputed and not memory.recomputes_layers
