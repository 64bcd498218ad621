"""Bad input is refused in one line, before any process group exists."""

from importlib.metadata import PackageNotFoundError

import pytest
from megatron.training import yaml_arguments

from megatron_pp_ext.megatron.core import placed_models
from megatron_pp_ext.megatron.trainer import validation
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.formats import costs_file
from megatron_pp_ext.schedule.placement import linear, loop
from tests.support.flags import PP4, assert_refused, estimated, read
from tests.support.ranks import RankError
from tests.support.training import train

LAYOUT = "--pipeline-model-parallel-layout"
VIRTUAL = "--num-virtual-stages-per-pipeline-rank"
FIRST = "--decoder-first-pipeline-num-layers"
UNTIED = "--untie-embeddings-and-output-weights"
REPLICATED = f"pipedream --pipeline-model-parallel-size 2 {UNTIED} --global-batch-size 3 --pipeline-replicas"
MEASURED = "v-half --pipeline-profile-steps"
FLEX = "flex --pipeline-memory-limit"

REFUSED = {
    "v-haf": r"'v-haf' \(did you mean 'v-half'\?\).*1f1b.*zb-h1",
    "v-half --pipeline-model-parallel-size 1": "needs a pipeline of 2 ranks or more, got .*size 1; set",
    "csv:/nowhere.csv": "No such file",
    "1f1b --micro-batch-size 8 --global-batch-size 4": "size 4 makes 0 microbatches .* set it to 8",
    # Stages and their layers.
    "v-half --num-layers 12": "has 8 stages: --num-layers 12 does not fill 8 stages evenly; let ",
    "v-zb --num-layers 4": "--num-layers 4 .*, or set it to 8$",
    f"v-half {VIRTUAL} 3": f"has 2 chunk.s. a rank, but {VIRTUAL} requests 3; set it to 2",
    f"v-half --num-layers 12 {VIRTUAL} 2": f"let {LAYOUT} auto in place of {VIRTUAL} choose uneven stages",
    f"interleaved {VIRTUAL} 1": "has 2 or more chunk.s. a rank, .* requests 1",
    f"auto --num-layers 12 {VIRTUAL} 3": f"auto has 2 or fewer chunk.s. a rank, but {VIRTUAL} requests 3",
    "v-half --num-layers 16 --num-layers-per-virtual-pipeline-stage 1": "stage requests 4; leave it out",
    f"{FLEX} 1 --num-layers 16 --num-layers-per-virtual-pipeline-stage 3": (
        "--num-layers-per-virtual-pipeline-stage 3 does not divide the 4 layers of a pipeline rank; "
    ),
    f"v-half {LAYOUT} Ett|tt|tt|ttL": f"{LAYOUT} requests 1; give it 8 stages",
    f"v-half {LAYOUT} Ett|tt|tt|tt|L": (
        "has 5 stages, which 4 pipeline ranks cannot share evenly; give it 4 or 8 stages"
    ),
    f"1f1b {FIRST} 1": f"7 layers cannot be shared evenly by 3 other ranks; change {FIRST}, or",
    f"interleaved {FIRST} 2 --num-layers 11": (
        rf"has 8 stages: ranks of \[2, 3, 3, 3\] layers cannot be cut into 2 chunks each; change {FIRST}"
    ),
    "v-half --account-for-loss-in-pipeline-split": (
        f"let {LAYOUT} auto in place of --account-for-loss-in-pipeline-split choose .*, or set it to 7 or 15$"
    ),
    "v-half --spec my.layers stack --hybrid-layer-pattern M*M*-M*-M*": (
        r"has 8 stages, .* a \|; write it as M\|\*\|M\|\*-\|M\|\*\|-\|M\*, for example"
    ),
    "v-half --spec my.layers stack --hybrid-layer-pattern M*|M*|M*|M*": "requests 1; give it 8 stages",
    # Memory limits and costs.
    f"{FLEX} 0": "--pipeline-memory-limit is 0, but must be a number above 0",
    f"{FLEX} half": "half",
    f"{FLEX} 0.9-4e9-0.9-0.9": "0.9-4e9-0.9-0.9",
    f"{FLEX} 1-1-1": "limit 1-1-1 is for 3 ranks, but --pipeline-model-parallel-size is 4; give one number",
    # Without a flush.
    f"pipedream {UNTIED} --global-batch-size 8": (
        r"updates every 1 microbatch\(es\), but --global-batch-size makes 8 a step; set it to 1 x .*, "
        "or --pipeline-update-interval to 8"
    ),
    f"pipedream {UNTIED} --global-batch-size 1 --pipeline-update-interval -1": "is -1, but must be 1 or more",
    f"pipedream-2bw {UNTIED} --global-batch-size 3": "ranks, 4, but got 3; raise",
    f"{REPLICATED} 3-": "--pipeline-replicas is '3-', but must have a number above 0",
    f"{REPLICATED} 0-4": "'0-4', but must have .* above 0 for each stage, as in 3-1",
    f"{REPLICATED} 2-1-1": "2-1-1 is for 3 stages, but .* is 2; set that to 3, or give 2",
    f"{REPLICATED} 3-1 --tensor-model-parallel-size 2": r"3-1 takes 4 x .* 2 = 8 ranks, but there are 4",
    f"{REPLICATED} 3-1 --global-batch-size 4 --pipeline-update-interval 4": (
        r"--global-batch-size: 4 microbatch\(es\) cannot be .* replicas 3-1; take a multiple of 3 x micro"
    ),
}
"""What training and ``mpp estimate`` refuse by the same line."""

BY_TRAINING = {
    "auto --moe-paged-stash": "--moe-paged-stash: it holds all steps to the order of its first",
    "1f1b --global-batch-size 0": "--global-batch-size 0 makes 0 microbatches .* set it to 1 or more",
    "1f1b --pipeline-trace /": "--pipeline-trace / is a folder; give a file in it",
    f"1f1b --pipeline-trace {__file__}/x.json": "test_refusals.py is no folder to write in; give another",
    "auto --pipeline-costs /nowhere.json": "No such file",
    f"{FLEX} 0.1": "infeasible.*raise the limit to at least",
    f"{FLEX} 1-1-0.1-1": "of rank 2 is infeasible.*raise the limit to at least",
    f"{MEASURED} 5": "needs two numbers of training steps .* got '5'",
    f"{MEASURED}=-1-2": "needs two numbers .* got '-1-2'",
    f"{MEASURED} 0-2": "0-2 starts before the first step; set it to 1-2",
    f"{MEASURED} 2-1": "2-1 ends before it starts; set it to 1-2",
    f"{MEASURED} 2-3": "2-3 leaves no step of --train-iters 3 .* let it end earlier",
}


@pytest.mark.parametrize("flags", [*REFUSED, *BY_TRAINING])
def test_refused_in_one_line(flags, monkeypatch):
    words, message = f"{PP4} --pipeline-schedule {flags}", {**REFUSED, **BY_TRAINING}[flags]
    assert_refused(monkeypatch, words, message)
    if flags in REFUSED:
        with pytest.raises(ValueError, match=" ") as training:
            read(monkeypatch, words)
        with pytest.raises(ValueError, match=" ") as estimate:
            estimated(words)
        assert str(training.value) == str(estimate.value)


@pytest.mark.parametrize("flag", ["--logits-save-dir", "--logits-load-dir"])
def test_files_of_logits_need_their_compressor(flag, monkeypatch):
    """Stock trains on where the writer of such files has ended, and waits for it for ever."""

    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(validation, "version", version)
    assert_refused(
        monkeypatch, f"--pipeline-model-parallel-size 1 {flag} a", "zstandard.*; pip install zstandard"
    )


HETEROGENEOUS = "--heterogeneous-layers-config-path layers.json"


def test_layers_of_their_own_are_compiled_for_one_chunk_a_rank(monkeypatch, tmp_path):
    """A V in place of it would fail when the model is built."""
    flags = f"{PP4} --pipeline-schedule flex --pipeline-memory-limit 1"
    assert {one.chunks for one in read(monkeypatch, flags).request.placements} != {1}
    costs_file.write(Costs.unit(linear(4)), tmp_path / "costs.json")
    flags += f" --pipeline-costs {tmp_path / 'costs.json'} {HETEROGENEOUS}"
    assert {one.chunks for one in read(monkeypatch, flags).request.placements} == {1}


def test_a_provider_that_builds_one_chunk_is_refused_several(monkeypatch):
    """As those of multimodal scripts are: they would fail by their own signature."""

    def provider(pre_process=True, post_process=True, config=None, pg_collection=None): ...

    def for_any(pre_process=True, post_process=True, **others): ...

    def for_chunks(pre_process=True, post_process=True, vp_stage=None): ...

    build = placed_models.build_chunks_placed(lambda provider: "built")
    size = "get_virtual_pipeline_model_parallel_world_size"
    for chunks, one in ((None, provider), (2, for_any), (2, for_chunks)):
        monkeypatch.setattr(placed_models.parallel_state, size, lambda chunks=chunks: chunks)
        assert build(one) == "built"
    with pytest.raises(
        ValueError, match=r"provider takes no vp_stage, .* 2 chunks to build; .* 1f1b or zb-h1"
    ):
        build(provider)


def test_without_our_flags_nothing_is_ours(monkeypatch):
    assert read(monkeypatch, PP4) is None


def test_interleaved_takes_the_chunks_that_stock_flags_give(monkeypatch):
    flags = f"{PP4} --pipeline-schedule interleaved --num-layers 16"
    assert read(monkeypatch, flags).placement.chunks == 2
    assert read(monkeypatch, f"{flags} --num-layers-per-virtual-pipeline-stage 1").placement.chunks == 4
    assert read(monkeypatch, f"{flags} --num-virtual-stages-per-pipeline-rank 4").placement.chunks == 4


def test_stock_trace_knows_the_placement(monkeypatch):
    pipeline = read(monkeypatch, f"{PP4} --pipeline-trace x.json --num-virtual-stages-per-pipeline-rank 2")
    assert (pipeline.source, pipeline.placement) == (None, loop(4, 2))


def test_a_yaml_configuration_is_refused(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--yaml-cfg", "x.yaml", "--pipeline-schedule", "1f1b"])
    with pytest.raises(SystemExit, match="--pipeline-schedule has no effect with --yaml-cfg"):
        yaml_arguments.validate_yaml(None)


def test_a_job_ends_with_that_line_and_no_process_group():
    with pytest.raises(
        RankError, match="SystemExit: megatron_pp_ext: --pipeline-schedule: no schedule is called"
    ):
        train(2, ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", "nope"])
