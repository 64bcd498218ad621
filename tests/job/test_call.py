"""What ``megatron_pp_ext.install`` refuses before it imports anything heavy."""

import subprocess
import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

import megatron_pp_ext
from megatron_pp_ext import activation
from megatron_pp_ext.job import call, model_config
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.rules import all_rules
from megatron_pp_ext.megatron import by_call
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs, HeadCosts
from megatron_pp_ext.schedule.formats import csv_file
from megatron_pp_ext.schedule.placement import FIRST, LAST, loop, v
from megatron_pp_ext.setting_error import NamesSettings, SettingError, SettingExit


@pytest.mark.parametrize(
    ("about", "line"),
    [
        ({"schedule": "v-hlaf"}, "v-hlaf"),
        ({"schedule": "pipedream"}, "pipedream never flushes: its stages update their weights within a step"),
        ({"schedule": "pipedream-2bw"}, "choose a schedule that flushes, such as 1f1b or v-half"),
        ({"ranks": 1}, "ranks is 1, but must be a whole number from 2 on; give ranks=2"),
        ({"ranks": 2.5}, "ranks is 2.5, but must be a whole number"),
        ({"microbatches": 0}, "microbatches is 0, but must be a whole number from 1 on"),
        ({"chunks": True}, "chunks is True, but must be a whole number"),
        ({"chunks": 3}, "v-half"),
        ({"memory_limit": 0.5}, "a memory limit has no meaning for v-half: leave it out, or choose flex"),
        ({"schedule": "flex"}, "flex needs a memory limit: give a fraction of 1F1B's peak, such as 0.5"),
        ({"schedule": "flex", "memory_limit": "half"}, "memory_limit is half, but must be a number above 0"),
        ({"offload": "auto", "memory_limit": "1-1-1-1-1"}, "is for 5 ranks, but ranks is 4"),
        ({"schedule": "flex", "memory_limit": 2e9}, "an amount in the unit of costs, and none are given"),
        ({"schedule": "flex", "memory_limit": 0.5, "costs": [1, 1, 1]}, "costs are given for 3 stages, but"),
        ({"schedule": "flex", "memory_limit": 0.5, "costs": "no.json"}, "no.json"),
        ({"schedule": "csv:no.csv"}, "csv:no.csv: "),
        ({"loss_rank": "second"}, "loss_rank is 'second'; give 'first' or 'last', or leave it out"),
        ({"schedule": "1f1b", "loss_rank": "first"}, "loss_rank is 'first', but 1f1b has the loss on the"),
        ({"vocabulary": "split"}, "vocabulary is 'split'; give 'shared' or 'auto', or leave it out"),
        ({"offload": 1.5}, "offload is 1.5, but must be a share above 0 and at most 1, or auto; give one"),
        ({"offload": "auto", "memory_limit": 0.01}, "memory limit"),
        ({"schedule": None}, "schedule is None; give a name, such as 'v-half'"),
        ({"costs": 3}, "costs are 3; give the path of a file, Costs, or a number for each stage"),
        ({"costs": ["a"] * 8}, "give the path of a file, Costs, or a number for each stage"),
        ({"trace": "/"}, "trace / is a folder; give a file in it"),
        ({"timeout": float("nan")}, "timeout is nan, but must be above 0; give minutes, such as 10"),
        ({"timeout": "10"}, "timeout is '10', but must be a number or a timedelta; give minutes, such as 10"),
        ({"offload": [1]}, "offload is [1], but must be a share above 0"),
        ({"schedule": "flex", "memory_limit": [0.5]}, "memory_limit is [0.5], but must be a number above 0"),
        (
            {"schedule": "flex", "memory_limit": "half"},
            "0.5, or an amount in the unit of costs, for all ranks",
        ),
        (
            {"schedule": "flex", "memory_limit": 0.1},
            "memory_limit is 0.1, which no schedule of 4 ranks can keep",
        ),
        ({"offload": True}, "offload is True, but must be a share above 0 and at most 1, or auto; give one"),
        ({"schedule": "flex", "memory_limit": True}, "memory_limit is True, but must be a number above 0"),
        ({"ranks": 10**9}, "but at most 2,000,000, which take minutes, are simulated: give fewer stages"),
        ({"schedule": "flex", "memory_limit": 0.5, "ranks": 10**9}, "are simulated: give fewer stages"),
        ({"schedule": "auto", "microbatches": 10**9}, "are simulated: give 83,333 microbatches or fewer"),
        ({"trace": 5}, "trace is 5; give the path of a file"),
        ({"timeout": 0}, "timeout is 0, but must be above 0; give minutes, such as 10"),
        ({"timeout": timedelta(0)}, "but must be above 0; give minutes, such as 10"),
        ({"unproved": "yes"}, "unproved is 'yes'; give True or False, or leave it out"),
    ],
    ids=lambda value: (
        "-".join(f"{name}={one}" for name, one in value.items()) if isinstance(value, dict) else ""
    ),
)
def test_what_cannot_be_is_refused_in_one_line(about, line) -> None:
    given = {"schedule": "v-half", "ranks": 4, "microbatches": 8, **about}
    with pytest.raises(ValueError) as error:
        megatron_pp_ext.install(given.pop("schedule"), **given)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [SettingError, SettingExit])
@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "--pipeline-vocabulary shared needs labels; leave it out",
            'vocabulary="shared" needs labels; leave it out',
        ),
        ("raise --pipeline-memory-limit, or give --pipeline-costs", "raise memory_limit, or give costs"),
        ("--pipeline-loss-rank first has no meaning", 'loss_rank="first" has no meaning'),
        ("--pipeline-order rule does not support it", 'order="rule" does not support it'),
        ("lower --pipeline-offload-host-bytes", "lower --pipeline-offload-host-bytes"),
        ("add --pipeline-unproved, or leave it out", "add unproved=True, or leave it out"),
        ("--overlap-p2p-communication-warmup-flush: why", "overlap_p2p_comm_warmup_flush: why"),
        ("--no-overlap-p2p-communication: why", "overlap_p2p_comm=False: why"),
        ("--num-experts 8 and --swiglu", "num_moe_experts 8 and gated_linear_unit"),
        ("--pipeline-schedule v-half: --none-of-megatrons", "v-half: --none-of-megatrons"),
    ],
)
def test_errors_name_the_arguments_of_a_call(kind: type[NamesSettings], line: str, words: str) -> None:
    """What is no argument of a call keeps its name."""
    with pytest.raises(kind) as error, model_config.in_words_of_call():
        raise kind(line)
    assert str(error.value) == getattr(error.value, "code", words) == words


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "--pipeline-vocabulary shared needs labels; add --pipeline-unproved",
            "MEGATRON_PP_VOCABULARY=shared needs labels; add MEGATRON_PP_UNPROVED=1",
        ),
        ("raise --pipeline-memory-limit", "raise MEGATRON_PP_MEMORY_LIMIT"),
        (
            "--pipeline-memory-limit is 2, for 3 ranks; give --pipeline-ranks=3, or leave "
            "--pipeline-memory-limit out",
            "MEGATRON_PP_MEMORY_LIMIT is 2, for 3 ranks; give MEGATRON_PP_RANKS=3, or leave "
            "MEGATRON_PP_MEMORY_LIMIT out",
        ),
        (
            "give --pipeline-slice-tokens, --moe-paged-stash",
            "give MEGATRON_PP_SLICE_TOKENS, moe_paged_stash",
        ),
    ],
)
def test_errors_name_the_variables_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, line: str, words: str
) -> None:
    """Where it made the call; what has no variable keeps its name."""
    monkeypatch.setattr(model_config, "_variables", {})
    model_config.use_variables({argument: name for name, (argument, _) in activation.VARIABLES.items()})
    assert model_config.by_call(line) == words


def test_errors_of_others_keep_their_text() -> None:
    with pytest.raises(ValueError, match=r"^no --num-experts in the file$"), model_config.in_words_of_call():
        raise ValueError("no --num-experts in the file")


def test_what_a_compiler_says_names_the_arguments_of_a_call() -> None:
    parts = HeadCosts(1.0, 0.5, activation=50.0)
    costs = replace(Costs.unit(loop(2, 2)), head=parts)
    about = {"memory_limit": 1.0, "vocabulary": "shared", "costs": costs}
    with pytest.raises(ValueError, match=r"raise memory_limit, or leave vocabulary out$"):
        megatron_pp_ext.install("flex", ranks=2, microbatches=4, **about)


def test_the_advised_memory_limit_can_be_given() -> None:
    sizes = {"ranks": 10, "microbatches": 12}
    with pytest.raises(ValueError) as error:
        by_call.read("flex", **sizes, memory_limit=0.01).pipeline()
    advised = float(str(error.value).rpartition(" ")[2])
    assert 0 < advised <= 1
    assert by_call.read("flex", **sizes, memory_limit=advised).pipeline()[1].peak <= advised * 10 + 1e-2
    with pytest.raises(ValueError):
        by_call.read("flex", **sizes, memory_limit=advised - 0.002).pipeline()


def test_a_call_asks_for_the_same_as_long_as_its_contents_are_the_same(tmp_path: Path) -> None:
    from megatron_pp_ext.schedule.formats import costs_file

    def asked(costs=None, schedule="v-half", **about):
        return by_call.read(schedule, ranks=2, microbatches=4, costs=costs, **about)

    costs, file, order = [1.0] * 4, tmp_path / "costs.json", tmp_path / "mine.csv"
    costs_file.write(Costs.unit(loop(2, 2)), file)
    megatron_pp_ext.write_csv(megatron_pp_ext.build("v-half", 2, 4), order)
    before = [
        asked(costs),
        asked(file),
        asked(np.array(costs)),
        asked(schedule=f"csv:{order}"),
        asked(timeout=5),
    ]
    again = [asked([1.0] * 4), asked(str(file)), asked(np.ones(4)), asked(schedule=f"csv:{order}")]
    assert [*again, asked(timeout=timedelta(minutes=5))] == before
    costs[0] = 2.0
    costs_file.write(Costs.unit(loop(2, 1)), file)
    megatron_pp_ext.write_csv(megatron_pp_ext.build("v-min", 2, 4), order)
    after = [
        asked(costs),
        asked(file),
        asked(np.array(costs)),
        asked(schedule=f"csv:{order}"),
        asked(timeout=6),
    ]
    assert [one == other for one, other in zip(before, after, strict=True)] == [False] * 5
    assert asked(offload=0.5) != asked() != asked(memory_limit=0.5, offload="auto")


def test_what_no_feature_takes_is_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'ofload'"):
        by_call.read("v-half", ranks=2, microbatches=4, ofload=0.5)


def test_nothing_heavy_is_imported_for_a_refusal() -> None:
    program = (
        "import sys, megatron_pp_ext\n"
        "try: megatron_pp_ext.install('pipedream', ranks=4, microbatches=8)\n"
        "except ValueError: print(sorted({'torch', 'megatron.core'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_a_file_is_for_its_own_ranks_and_microbatches(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    megatron_pp_ext.write_csv(megatron_pp_ext.build("v-half", 4, 8), file)
    found = call.request_of_call(f"csv:{file}", 4, 8)
    assert (found.placement.chunks, found.splits_backward) == (2, True)
    for wrong, line in (
        ((2, 8), "4 ranks, got 2"),
        ((4, 6), "8 microbatches, got 6"),
        ((4, 8, 1), "2 chunks"),
    ):
        with pytest.raises(ValueError, match=line):
            call.request_of_call(f"csv:{file}", *wrong)
    with pytest.raises(ValueError, match="a memory limit has no meaning for csv:"):
        call.request_of_call(f"csv:{file}", 4, 8, limit=0.5)


def test_costs_are_a_file_an_object_or_numbers(tmp_path: Path) -> None:
    from megatron_pp_ext.schedule.formats import costs_file

    unit = Costs.unit(loop(2, 2))
    costs_file.write(unit, tmp_path / "costs.json")
    assert call.read_costs(unit) is unit
    assert call.read_costs([1.0] * 4) == unit
    assert call.read_costs(tmp_path / "costs.json") == unit


def test_rules_for_flags_hold_a_model_s_config_in_its_words() -> None:
    from dataclasses import make_dataclass

    experts = "overlap_dispatch_backward_with_experts_wgrad"
    config = make_dataclass("Config", [(experts, bool), ("num_moe_experts", int)])(True, 8)
    parallel = make_dataclass("Parallel", [(experts, bool), ("use_megatron_fsdp", bool)])(False, False)
    asked = {"pipeline_schedule": "zb-h1", "pipeline_model_parallel_size": 2}
    args = model_config.arguments(config, parallel, **asked)
    assert (getattr(args, experts), args.num_experts, args.use_megatron_fsdp) == (True, 8, False)
    all_rules.refuse_model(RequestedJob.of_args(args, splits=False))
    own_words = model_config.in_words_of_call
    with pytest.raises(ValueError, match=rf"^zb-h1 does not support {experts}: schedules"), own_words():
        all_rules.refuse_model(RequestedJob.of_args(args, splits=True))
    parallel.use_megatron_fsdp = True
    args = model_config.arguments(config, parallel, **asked)
    line = r"^zb-h1 does not support use_megatron_fsdp: FSDP reduces"
    with pytest.raises(ValueError, match=line), own_words():
        all_rules.refuse_model(RequestedJob.of_args(args))


def test_an_order_of_a_call_keeps_the_rules_for_flags() -> None:
    from dataclasses import make_dataclass

    config = make_dataclass("Config", [("moe_enable_routing_replay", bool)])(True)
    known = {"pipeline_schedule": "zb-h1", "pipeline_model_parallel_size": 2}
    all_rules.refuse_model(RequestedJob.of_args(model_config.arguments(config, **known)))
    args = model_config.arguments(config, **known, pipeline_order="rule")
    line = r'^order="rule" does not support moe_enable_routing_replay: routing is'
    with pytest.raises(ValueError, match=line), model_config.in_words_of_call():
        all_rules.refuse_model(RequestedJob.of_args(args))


def test_a_v_has_both_ends_on_the_last_rank_unless_told_otherwise(tmp_path: Path) -> None:
    """Also one of a file; a schedule with its ends on two ranks stays as it is."""
    sizes = {"ranks": 4, "microbatches": 8}
    file = tmp_path / "mine.csv"
    csv_file.write(catalog.build("v-zb", 4, 8), file)
    for name in ("v-half", f"csv:{file}"):
        request = call.request_of_call(name, **sizes)
        assert request.placement == v(4).with_loss_on(LAST)
        assert call.request_of_call(name, **sizes, loss_rank=FIRST).placement == v(4)
    assert call.request_of_call("interleaved", **sizes).placement == loop(4, 2)
    flex = call.request_of_call("flex", **sizes, limit=0.5)
    assert {one.ends_on_last for one in flex.placements if one.folds} == {True}
    assert {one.ends_on_last for one in flex.placements if not one.folds} == {False}


@pytest.mark.parametrize(("shards", "parts"), [(2, None), (4, 4), (None, None)])
def test_weights_cut_over_the_ranks_alone_are_no_setting(shards: int | None, parts: int | None) -> None:
    """A config that Megatron makes of arguments has as many parts as ranks where nothing is gathered."""

    @dataclass
    class Config:
        tensor_model_parallel_size: int = 2
        tensor_parallel_num_weight_shards: int | None = shards
        expert_tensor_parallel_size: int = 1
        expert_tensor_parallel_num_weight_shards: int | None = 1

    read = model_config.arguments(Config())
    assert read.tensor_parallel_num_weight_shards == parts
    assert read.expert_tensor_parallel_num_weight_shards is None
