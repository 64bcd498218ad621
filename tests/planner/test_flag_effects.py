"""What each of Megatron's flags does to an estimate, found by giving it other values than its own."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron_pp_ext.costs import system
from megatron_pp_ext.job import flag_effects, flag_table, layers
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner import described
from megatron_pp_ext.planner.step.estimate import Estimate, estimate_request
from tests import support
from tests.support.tiers import first

SIZES = (
    "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 16"
)
ON_4 = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"
LATENT = (
    f"{SIZES} --vocab-size 1000 {ON_4} --bf16 --sequence-parallel --disable-bias-linear "
    "--multi-latent-attention --dsa-indexer-n-heads 8 --dsa-indexer-topk 64 --dsa-indexer-head-dim 64"
)
MODELS = {
    "dense": f"{SIZES} --vocab-size 1000 {ON_4} --bf16 --fp8-format hybrid --use-distributed-optimizer "
    "--sequence-parallel --num-query-groups 2 --overlap-grad-reduce --use-precision-aware-optimizer",
    "plain": f"{SIZES} --padded-vocab-size 1000 --pipeline-model-parallel-size 2 --fp16 "
    "--group-query-attention --transformer-impl local --attention-dropout 0 --hidden-dropout 0",
    "experts": f"{SIZES} --vocab-size 1000 {ON_4} --bf16 --num-experts 16 --moe-ffn-hidden-size 256 "
    "--moe-layer-freq 2 --expert-model-parallel-size 8 --micro-batch-size 4 --global-batch-size 256 "
    "--num-layers-per-virtual-pipeline-stage 2 --disable-bias-linear --optimizer sgd "
    "--moe-token-dispatcher-type alltoall --moe-router-topk 4 --moe-expert-capacity-factor 1.5",
    "recomputed": f"{SIZES} --vocab-size 1000 {ON_4} --bf16 --recompute-granularity full "
    "--recompute-method block --recompute-num-layers 1",
    "selective": f"{SIZES} --vocab-size 1000 {ON_4} --bf16 --recompute-granularity selective --swiglu "
    "--transformer-impl local",
    "of seven layers": f"{SIZES} --num-layers 7 --vocab-size 1000 {ON_4} --disable-bias-linear",
    "of windows": f"{SIZES} --vocab-size 1000 {ON_4} --bf16 --window-size 127,0 --qk-layernorm "
    "--defer-embedding-wgrad-compute --cross-entropy-loss-fusion",
    "of latent keys": f"{LATENT} --q-lora-rank 256",
    "sparse": f"{LATENT} --experimental-attention-variant dsa --dsa-indexer-topk-freq 3",
    "sparse in kernels": f"{LATENT} --experimental-attention-variant dsa --dsa-kernel-backend cudnn "
    "--dsa-indexer-loss-coeff 0.5 --seq-length 8192 --max-position-embeddings 8192",
    "of linear attention": f"{SIZES} --vocab-size 1000 {ON_4} --bf16 --linear-attention-freq 4 "
    "--experimental-attention-variant gated_delta_net",
    "of encoders": "--encoder-num-layers 8 --encoder-seq-length 1024 --hidden-size 512 "
    "--num-attention-heads 8 --micro-batch-size 2 --step-batch-size-schedule 0:64 --vocab-size 1000",
    "hybrid": f"{SIZES} --vocab-size 1000 {ON_4} --bf16 --hybrid-layer-pattern M-*-M-M- "
    "--mtp-num-layers 2 --optimizer muon --use-distributed-optimizer --swiglu "
    "--position-embedding-type none",
    "latent": f"{SIZES} --vocab-size 1000 --pipeline-model-parallel-size 2 --bf16 --num-experts 16 "
    "--moe-ffn-hidden-size 256 --moe-shared-expert-intermediate-size 512 --moe-latent-size 1024 "
    "--squared-relu --disable-bias-linear --global-batch-size 64 --optimizer-cpu-offload "
    "--optimizer-offload-fraction 0.5 --use-distributed-optimizer --use-precision-aware-optimizer",
    "gated experts": f"{SIZES} --vocab-size 1000 --pipeline-model-parallel-size 2 --bf16 --num-experts 16 "
    "--moe-ffn-hidden-size 256 --quick-geglu --global-batch-size 64 --moe-expert-capacity-factor 0.5",
    "gated without biases": f"{SIZES} --vocab-size 1000 --bf16 --quick-geglu --disable-bias-linear",
    "of sharded weights": f"{SIZES} --vocab-size 1000 --bf16 --use-megatron-fsdp",
    "in FP4": f"{SIZES} --vocab-size 1000 --bf16 --fp4-format e2m1",
    "of groups of experts": f"{SIZES} --vocab-size 1000 --bf16 --num-experts 16 --moe-ffn-hidden-size 256 "
    "--expert-model-parallel-size 8 --global-batch-size 64 --disable-bias-linear --moe-router-topk 4 "
    "--moe-token-dispatcher-type flex --moe-router-num-groups 8 --moe-router-group-topk 3",
    "of experts in MXFP8": f"{SIZES} --vocab-size 1000 --bf16 --num-experts 16 --moe-ffn-hidden-size 4096 "
    "--expert-model-parallel-size 8 --micro-batch-size 8 --global-batch-size 64 --moe-grouped-gemm --swiglu "
    "--disable-bias-linear --fp8-format e4m3 --fp8-recipe mxfp8 --moe-token-dispatcher-type flex "
    "--moe-flex-dispatcher-backend hybridep --moe-expert-rank-capacity-factor 1.5",
    "in graphs": f"{SIZES} --vocab-size 1000 {ON_4} --bf16 --pipeline-schedule v-half --pipeline-unproved "
    "--cuda-graph-impl transformer_engine",
    "of a batch that does not divide": f"{SIZES} --global-batch-size 18 --vocab-size 1000 {ON_4}",
}  # fmt: skip
"""Models that need different flags; that of seven layers and the last need one flag more."""

SYSTEMS = {"in FP4": "b200", "of experts in MXFP8": "b200"}
GPUS = {
    "experts": 64,
    "of groups of experts": 8,
    "of experts in MXFP8": 8,
    "of encoders": 1,
    "latent": 64,
    "gated experts": 64,
}


EIGHT = Path(support.__file__).with_name("eight_blocks.json")
"""Eight layers, each described by itself."""

TEXTS = {
    "hybrid_layer_pattern": ["*-*-*-*-"],
    "hybrid_override_pattern": ["*-*-*-*-"],
    "pipeline_model_parallel_layout": ["Et*3|t*5L"],
    "moe_layer_freq": ["[0,1,1,1,1,1,1,1]"],
    "step_batch_size_schedule": ["0:128"],
    "recompute_modules": ["layernorm"],
    "cuda_graph_modules": ["attn"],
    "window_size": ["127,0"],
    "mtp_hybrid_override_pattern": ["*-"],
    "heterogeneous_layers_config_path": [str(EIGHT)],
    "heterogeneous_layers_config_encoded_json": [EIGHT.read_text()],
    "window_attn_skip_freq": ["2", "[0,1,1,1,1,1,1,1]"],
    "linear_attention_freq": ["2", "[0,1,1,1,1,1,1,1]"],
}
"""Values of flags that take a text of some form."""

NUMBERS = ("2", "4", "1", "0", "96", "4096")
ROWS = flag_table.rows()


def values(name: str) -> Iterator[list[str]]:
    """Yield command lines that give the argument another value than its default."""
    for row in ROWS:
        if row["dest"] != name:
            continue
        if "sets" in row:
            if row["sets"] != row["default"]:
                yield [row["flags"][0]]
            continue
        few = TEXTS.get(name) or row.get("choices") or (NUMBERS if row.get("type") else ("x",))
        is_number = row.get("type") in ("int", "float")
        for value in few:
            if row["default"] is None or (float(value) if is_number else value) != row["default"]:
                yield [row["flags"][0], str(value)]


@cache
def estimated(model: str, *more: str) -> Estimate | None:
    """Return the estimate of one of ``MODELS`` with more flags; None where that is refused."""
    try:
        asked = described.read([*MODELS[model].split(), *more], None).counted()
        return estimate_request(
            asked, system.read(SYSTEMS.get(model, "h100")), for_world(asked, GPUS.get(model, 16))
        )
    except ValueError:
        return None


def changes(name: str, model: str) -> bool:
    """Whether some value of the argument ``name`` changes the estimate of ``model``."""
    found = (estimated(model, *words) for words in values(name))
    return any(one is not None and one != estimated(model) for one in found)


def spread(names: list[str], number: int) -> list[Any]:
    """Return ``names`` for ``parametrize``, all but ``number`` from everywhere among them marked ``wide``."""
    every = len(names) // number
    return first(number, sorted(names, key=lambda name: names.index(name) % every > 0))


def with_rows(names: set[str]) -> list[str]:
    """Return those of ``names`` that have rows, in order."""
    return sorted(names & {row["dest"] for row in ROWS})


WITHOUT = {name for names in flag_effects.table()["without_effect"].values() for name in names.split()}
BOUNDS = {name for names in flag_effects.table()["bounds"].values() for name in names.split()}
REFUSED = flag_effects.refused("stages") | flag_effects.refused("step")


def test_every_row_is_in_one_class() -> None:
    table = flag_effects.table()
    sections = table["counted"], table["bounds"], *table["refused"].values()
    listed = [name for groups in sections for names in groups.values() for name in names.split()]
    assert len(listed) == len(set(listed)) and not WITHOUT & set(listed)
    names = {row["dest"] for row in ROWS}
    assert set(listed) <= names <= {*listed, *WITHOUT}


def test_values_that_costs_know_are_some_of_megatrons() -> None:
    rows = {row["dest"]: row for row in ROWS}
    for what in ("stages", "step"):
        for name, known in flag_effects.table()["values"][what].items():
            assert name in flag_effects.counted()
            assert set(known) < set(rows[name]["choices"])


@pytest.mark.parametrize("name", with_rows(flag_effects.counted()))
def test_what_is_counted_changes_some_estimate(name: str) -> None:
    """Models that have the flag are asked first: they are most likely to show what another value does."""
    flag = next(values(name))[0]
    assert any(changes(name, model) for model in sorted(MODELS, key=lambda one: flag not in MODELS[one]))


@pytest.mark.parametrize("name", spread(with_rows(WITHOUT), 24))
def test_what_has_no_effect_changes_no_estimate(name: str) -> None:
    assert not any(changes(name, model) for model in ("dense", "experts"))


@pytest.mark.parametrize("name", spread(with_rows(BOUNDS), 12))
def test_what_is_said_beside_an_estimate_is_named_there(name: str) -> None:
    for words in values(name):
        asked = described.read([*MODELS["dense"].split(), *words], None).job
        (line,) = flag_effects.not_counted(asked)
        assert line.startswith(f"{words[0]} (")
        assert not changes(name, "dense")


@pytest.mark.parametrize("name", with_rows(set(REFUSED)))
def test_what_an_estimate_would_be_wrong_with_is_refused_in_one_line(name: str) -> None:
    words = next(values(name))
    with pytest.raises(ValueError, match=r"^the planner does not support --") as error:
        described.read([*MODELS["experts"].split(), *words], None).counted()
    assert f"{' '.join(words)}: {REFUSED[name]}; leave it out of the estimate" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", ["1023,0", "-1,0", "4096,4096"])
def test_a_window_as_long_as_the_sequence_is_no_window(value: str) -> None:
    assert estimated("dense", f"--window-size={value}") == estimated("dense")
    longer = "--seq-length", "8192", "--max-position-embeddings", "8192"
    assert estimated("dense", *longer, "--window-size=1022,0") != estimated("dense", *longer)


def test_a_default_that_is_given_is_not_asked() -> None:
    given = ("--num-distributed-optimizer-instances", "1", "--softmax-type", "vanilla", "--optimizer", "adam")
    asked = described.read([*MODELS["dense"].split(), *given], None).counted()
    assert flag_effects.not_counted(asked) == []


def test_other_optimizers_are_refused() -> None:
    known = "only adam, sgd, muon, dist_muon, adaptive_muon and lion are modelled"
    with pytest.raises(ValueError, match=f"--optimizer soap: {known}; leave it out"):
        described.read([*MODELS["dense"].split(), "--optimizer", "soap"], None).counted()


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
        layers.by_stage(asked, for_world(asked, 8).finest.stages)
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
