"""Bad input is refused in one line, before any process group exists."""

import pytest
from megatron.training import yaml_arguments

from megatron_pp_ext.integration.core import mirrored_chunks
from megatron_pp_ext.schedule import costs_file
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import linear, loop
from tests.support.flags import PP4, assert_refused, read
from tests.support.ranks import RankError
from tests.support.training import train

LAYOUT = "--pipeline-model-parallel-layout"

REFUSED = {
    "unknown name": (f"{PP4} --pipeline-schedule v-haf", r"'v-haf' \(did you mean 'v-half'\?\).*1f1b.*zb-h1"),
    "trace into a folder": (f"{PP4} --pipeline-trace /", "--pipeline-trace / is a folder; give a file in it"),
    "trace below a file": (
        f"{PP4} --pipeline-trace {__file__}/x.json",
        "test_refusals.py is no folder to write in; give another path",
    ),
    "odd layers for a V": (
        f"{PP4} --pipeline-schedule v-half --num-layers 12",
        "has 8 stages: --num-layers 12 does not fill 8 stages evenly; set it to 8 or 16",
    ),
    "too few layers": (f"{PP4} --pipeline-schedule v-zb --num-layers 4", "--num-layers 4 .* set it to 8, or"),
    "layers and ends": (
        f"{PP4} --pipeline-schedule v-half --account-for-loss-in-pipeline-split",
        "--num-layers 8 .* set it to 7 or 15",
    ),
    "no microbatch": (
        f"{PP4} --pipeline-schedule 1f1b --global-batch-size 0",
        "--global-batch-size 0 makes 0 microbatches .* set it to 1 or more",
    ),
    "less than a microbatch": (
        f"{PP4} --pipeline-schedule 1f1b --micro-batch-size 8 --global-batch-size 4",
        "--global-batch-size 4 makes 0 microbatches .* set it to 8",
    ),
    "virtual stages": (
        f"{PP4} --num-virtual-stages-per-pipeline-rank 3 --pipeline-schedule v-half",
        "has 2 chunk.s. a rank, but --num-virtual-stages-per-pipeline-rank requests 3; set it to 2",
    ),
    "virtual stages on a line": (
        f"{PP4} --num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule zb-h1",
        "has 1 chunk.s. a rank, but --num-virtual-stages-per-pipeline-rank requests 2",
    ),
    "layers a virtual stage": (
        f"{PP4} --num-layers 16 --num-layers-per-virtual-pipeline-stage 1 --pipeline-schedule v-half",
        "--num-layers-per-virtual-pipeline-stage requests 4; leave it out",
    ),
    "layout": (
        f"{PP4} --pipeline-model-parallel-layout Ett|tt|tt|ttL --pipeline-schedule v-half",
        "--pipeline-model-parallel-layout requests 1; give it 8 stages",
    ),
    "uneven layout": (
        f"{PP4} --pipeline-model-parallel-layout Ett|tt|tt|tt|L --pipeline-schedule v-half",
        "has 5 stages, which 4 pipeline ranks cannot share evenly; give it 4 or 8 stages",
    ),
    "given ends that leave no even rest": (
        f"{PP4} --decoder-first-pipeline-num-layers 1 --pipeline-schedule 1f1b",
        "7 layers cannot be shared evenly by 3 other ranks; change --decoder-first-pipeline-num-layers, or",
    ),
    "given ends in chunks": (
        f"{PP4} --decoder-first-pipeline-num-layers 2 --num-layers 11 --pipeline-schedule interleaved",
        r"has 8 stages: ranks of \[2, 3, 3, 3\] layers cannot be cut into 2 chunks each; change --decoder-f",
    ),
    "hybrid pattern without stages": (
        f"{PP4} --spec my.layers stack --hybrid-layer-pattern M*M*-M*-M* --pipeline-schedule v-half",
        r"has 8 stages, .* a \|; write it as M\|\*\|M\|\*-\|M\|\*\|-\|M\*, for example",
    ),
    "hybrid pattern with other stages": (
        f"{PP4} --spec my.layers stack --hybrid-layer-pattern M*|M*|M*|M* --pipeline-schedule v-half",
        "--hybrid-layer-pattern requests 1; give it 8 stages",
    ),
    "layers that are no whole stages": (
        f"{PP4} --num-layers 16 --num-layers-per-virtual-pipeline-stage 3 --pipeline-schedule flex "
        "--pipeline-memory-limit 1",
        "--num-layers-per-virtual-pipeline-stage 3 does not divide the 4 layers of a pipeline rank; ",
    ),
    "more chunks than auto has": (
        f"{PP4} --num-layers 12 --num-virtual-stages-per-pipeline-rank 3 --pipeline-schedule auto",
        "auto has 2 or fewer chunk.s. a rank, but --num-virtual-stages-.* requests 3; set it to 2",
    ),
    "uneven layers in chunks": (
        f"{PP4} --num-layers 12 --num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule v-half",
        f"or describe uneven stages with {LAYOUT} in place of --num-virtual-stages-per-pipeline-rank$",
    ),
    "uneven layers and ends": (
        f"{PP4} --account-for-loss-in-pipeline-split --pipeline-schedule v-half",
        f"set it to 7 or 15, or describe .* {LAYOUT} in place of --account-for-loss-in-pipeline-split$",
    ),
    "interleaved with one chunk": (
        f"{PP4} --num-virtual-stages-per-pipeline-rank 1 --pipeline-schedule interleaved",
        "has 2 or more chunk.s. a rank, .* requests 1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case, monkeypatch):
    assert_refused(monkeypatch, *REFUSED[case])


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

    build = mirrored_chunks.build_chunks_placed(lambda provider: "built")
    size = "get_virtual_pipeline_model_parallel_world_size"
    for chunks, one in ((None, provider), (2, for_any), (2, for_chunks)):
        monkeypatch.setattr(mirrored_chunks.parallel_state, size, lambda chunks=chunks: chunks)
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
    with pytest.raises(SystemExit, match="--pipeline-schedule has no effect beside --yaml-cfg"):
        yaml_arguments.validate_yaml(None)


def test_a_job_ends_with_that_line_and_no_process_group():
    with pytest.raises(
        RankError, match="SystemExit: megatron_pp_ext: --pipeline-schedule: no schedule is called"
    ):
        train(2, ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", "nope"])
