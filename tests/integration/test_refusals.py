"""Bad input is refused in one line, before any process group exists."""

from argparse import Namespace

import pytest
from megatron.training import yaml_arguments

from megatron_pp_ext.integration.core import mirrored_chunks
from megatron_pp_ext.integration.trainer.engine_layers import require_layers
from megatron_pp_ext.job.refusals import ALWAYS, MIRRORED, SPLIT, unsplit_engine
from megatron_pp_ext.schedule.placement import loop
from tests.support.flags import PP4, arguments, assert_refused, read
from tests.support.ranks import RankError
from tests.support.training import has_flag, train

LAYOUT = "--pipeline-model-parallel-layout"

REFUSED = {
    "unknown name": (f"{PP4} --pipeline-schedule v-haf", r"'v-haf' \(did you mean 'v-half'\?\).*1f1b.*zb-h1"),
    "no pipeline": (
        "--pipeline-schedule v-half",
        "needs a pipeline of 2 ranks or more, got .* 1; set it to 2",
    ),
    "trace of no pipeline": (
        "--pipeline-trace x.json",
        "--pipeline-trace needs a pipeline of 2 ranks or more",
    ),
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
    "prediction in the first chunk of a rank": (
        f"{PP4} {LAYOUT} Et|t|ttttttm|||||L --mtp-num-layers 1 --pipeline-schedule v-half",
        r"v-half does not support .* \(m\) in stage 2, .* of .*; put the m into stage 4 or 5 or 6 or 7$",
    ),
    "prediction on the first rank": (
        f"{PP4} {LAYOUT} Et|t|t|t|ttttm|||L --mtp-num-layers 1 --pipeline-schedule interleaved",
        r"interleaved does not support .* \(m\) in stage 4, .* of .*; put the m into stage 5 or 6 or 7$",
    ),
    "uneven layout": (
        f"{PP4} --pipeline-model-parallel-layout Ett|tt|tt|tt|L --pipeline-schedule v-half",
        "has 5 stages, which 4 pipeline ranks cannot share evenly; give it 4 or 8 stages",
    ),
    "given ends of a V": (
        f"{PP4} --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3 "
        "--pipeline-schedule v-half",
        r"--decoder-first-.*: a V has both ends .*-model-parallel-layout 'E\|t\|t\|t\|t\|t\|tt\|tL'",
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
        f"{PP4} --hybrid-layer-pattern M*M*-M*-M* --pipeline-schedule v-half",
        r"has 8 stages, .* a \|; write it as M\|\*\|M\|\*-\|M\|\*\|-\|M\*, for example",
    ),
    "hybrid pattern with other stages": (
        f"{PP4} --hybrid-layer-pattern M*|M*|M*|M* --pipeline-schedule v-half",
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
    "a layout and the ends of another": (
        f"{PP4} {LAYOUT} Ett|tt|tt|ttL --account-for-loss-in-pipeline-split --pipeline-schedule 1f1b",
        "the layout has all that they say; leave --account-for-loss-in-pipeline-split out",
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


@pytest.mark.parametrize(
    ("schedule", "refusal"),
    [
        *(("v-half", r) for r in (*ALWAYS, unsplit_engine("0.0.0"), *SPLIT, *MIRRORED)),
        *(("1f1b", r) for r in ALWAYS),
    ],
    ids=lambda value: getattr(value, "flag", value),
)
def test_every_refusal_is_reached(schedule, refusal, monkeypatch):
    """Each line of the table refuses the flags that it names, and Megatron knows those flags."""
    values = {
        "--cuda-graph-impl": " local",
        "--microbatch-group-size-per-virtual-pipeline-stage": " 4",
        "--decoder-first-pipeline-num-layers": " 2",
        "--decoder-last-pipeline-num-layers": " 2",
        "--moe-paged-stash": " --pipeline-profile-steps 1-2",
        "--tensor-parallel-num-weight-shards": " 2",
        "--expert-tensor-parallel-num-weight-shards": " 2",
    }
    if not has_flag(refusal.flag.split()[0]):
        pytest.skip(f"this Megatron has no {refusal.flag}")
    flags = refusal.flag + values.get(refusal.flag, "")
    with pytest.raises(ValueError, match=rf"{schedule} does not support {refusal.flag}: "):
        read(monkeypatch, f"{PP4} --pipeline-schedule {schedule} {flags}")


HETEROGENEOUS = "--heterogeneous-layers-config-path layers.json"
LOGITS = "it looks for the output layer on every rank of the pipeline"
ONE_CHUNK = (
    "without knowing for which of several chunks .* choose a schedule with one chunk a rank, such as 1f1b"
)
NO_PLANS = "layers of a hybrid model have no plans .*; leave it out, or describe the model without --hybrid-"
UNDER_ANY = {
    "saved logits": ("--logits-save-dir logits", LOGITS),
    "logits to learn from": ("--logits-load-dir logits", LOGITS),
    "layers of their own in chunks": (f"{HETEROGENEOUS} --num-virtual-stages-per-pipeline-rank 2", ONE_CHUNK),
    "hybrid pairs": ("--hybrid-layer-pattern *|*|*|* --overlap-moe-expert-parallel-comm", NO_PLANS),
    "recomputation without end": (
        "--recompute-granularity selective --recompute-modules mlp",
        "calls itself without end .*; add --disable-bias-linear, or recompute others, such as core_attn",
    ),
}
"""What Megatron fails with under every schedule."""


@pytest.mark.parametrize("schedule", ["", "--pipeline-schedule 1f1b", "--pipeline-schedule interleaved"])
@pytest.mark.parametrize("case", UNDER_ANY)
def test_what_megatron_cannot_run_is_refused_under_its_own_schedules_too(case, schedule, monkeypatch):
    flags, message = UNDER_ANY[case]
    if "chunks" in case and "1f1b" in schedule:
        flags = HETEROGENEOUS
        assert read(monkeypatch, f"{PP4} {flags} {schedule}") is not None
        return
    for flag in flags.split():
        if flag.startswith("--") and not has_flag(flag):
            pytest.skip(f"this Megatron has no {flag}")
    assert_refused(monkeypatch, f"{PP4} {flags} {schedule}", message)


def test_layers_of_their_own_are_compiled_for_one_chunk_a_rank(monkeypatch):
    """A V in place of it would fail when the model is built."""
    flags = f"{PP4} --pipeline-schedule flex --pipeline-memory-limit 1"
    assert {one.chunks for one in read(monkeypatch, flags).request.placements} != {1}
    assert {one.chunks for one in read(monkeypatch, f"{flags} {HETEROGENEOUS}").request.placements} == {1}
    assert_refused(monkeypatch, f"{PP4} {HETEROGENEOUS} --pipeline-schedule v-half", ONE_CHUNK)


NOT_LOCAL = {
    "--multi-latent-attention": "--multi-latent-attention",
    "--experimental-attention-variant": "--experimental-attention-variant gated_delta_net",
    "--moe-latent-size": "--num-experts 4 --moe-latent-size 16",
}


@pytest.mark.parametrize("flag", NOT_LOCAL)
def test_layers_that_are_transformer_engines_alone_are_refused_on_a_cpu(flag):
    if not has_flag(flag):
        pytest.skip(f"this Megatron has no {flag}")
    with pytest.raises(
        ValueError, match=f"--transformer-impl local does not support {flag}: .*; train it on a"
    ):
        require_layers(arguments(NOT_LOCAL[flag]))
    require_layers(arguments(f"{NOT_LOCAL[flag]} --spec my.layers stack"))
    require_layers(arguments(f"{NOT_LOCAL[flag]} --transformer-impl transformer_engine"))


def test_a_provider_that_builds_one_chunk_is_refused_several(monkeypatch):
    """As those of multimodal scripts are: they would fail by their own signature."""

    def provider(pre_process=True, post_process=True, config=None, pg_collection=None): ...

    def for_any(pre_process=True, post_process=True, **others): ...

    def for_chunks(pre_process=True, post_process=True, vp_stage=None): ...

    build = mirrored_chunks.build_chunks_placed(lambda provider: "built")
    for chunks, one in ((None, provider), (2, for_any), (2, for_chunks)):
        given = Namespace(virtual_pipeline_model_parallel_size=chunks)
        monkeypatch.setattr(mirrored_chunks, "get_args", lambda given=given: given)
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
