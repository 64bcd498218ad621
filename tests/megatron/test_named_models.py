"""Models by name, and flags that are read without Megatron: both mean what Megatron reads in them."""

from argparse import Action, ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest

from megatron_pp_ext.job import flag_table
from megatron_pp_ext.job.flag_table import spelled
from megatron_pp_ext.jobs.command import missing
from megatron_pp_ext.megatron.releases import NEWEST, megatron_release
from megatron_pp_ext.planner import described
from megatron_pp_ext.planner.hugging_face import config_json
from megatron_pp_ext.planner.hugging_face.config_json import GivenModel
from megatron_pp_ext.planner.search.launch_lines import Launch
from megatron_pp_ext.planner.step import model_description
from tests.support import model_configs
from tests.support.architectures import FLAGS, flags
from tests.support.comparison import assert_same_bits, run, stock
from tests.support.flags import (
    configured,
    megatron_arguments,
    pasted,
    read_by_commands,
    read_by_megatron,
    validated,
)
from tests.support.tiers import wide
from tests.support.training import TINY

GPUS = 8


def as_megatron_reads(words: Sequence[str], ours: Namespace) -> dict[str, Any]:
    """What Megatron reads in ``words`` for the arguments that costs depend on."""
    theirs = read_by_megatron(words)
    theirs.attention_backend = getattr(ours, "args", ours).attention_backend  # an enumeration there
    if theirs.window_size is not None:
        theirs.window_size = "{},{}".format(*theirs.window_size)  # two numbers there
    return {name: getattr(theirs, name) for name in model_description.arguments()}


def counted(args: Namespace) -> dict[str, Any]:
    return {name: getattr(getattr(args, "args", args), name) for name in model_description.arguments()}


SIZES = (
    "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
    "--micro-batch-size 1 --global-batch-size 8"
)


@pytest.mark.parametrize("name", described.names())
def test_a_named_model_is_to_megatrons_parser_what_it_is_to_the_planner(name: str) -> None:
    found = described.read(SIZES.split(), name)
    assert as_megatron_reads(found.words, found.job.args) == counted(found.job.args)


@pytest.mark.parametrize("name", ["gpt3-175b", "qwen3-30b-a3b"])
def test_the_command_of_a_named_model_passes_megatrons_validation(name: str) -> None:
    found = described.read(SIZES.split(), name)
    variables, flags = pasted(Launch([*found.words, *missing(found.words)], GPUS, GPUS).text)
    args, _ = validated(flags, GPUS, variables)
    for size in ("num_layers", "ffn_hidden_size", "num_experts", "moe_ffn_hidden_size", "rotary_base"):
        assert getattr(args, size) == getattr(found.job.args, size)
    assert args.data_parallel_size == 2


PP4 = "--pipeline-model-parallel-size 4"
LINES = (
    f"{PP4} --pipeline-schedule flex --pipeline-memory-limit 0.5 --num-layers-per-virtual-pipeline-stage 1",
    f"{PP4} --pipeline-schedule v-half --pipeline-model-parallel-layout E|t|t|t*2|t|t||L --fp16",
    f"{PP4} --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers=3",
    "--recompute-granularity selective --recompute-modules core_attn mlp --disable-bias-linear --swiglu",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --sequence-parallel",
    "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap --moe-grouped-gemm",
    "--num-experts 4 --moe-router-topk 1 --moe-router-pre-softmax --moe-layer-freq 2 --bf16 "
    "--fp8-format hybrid --mock-data",
    "--optimizer sgd --normalization RMSNorm --position-embedding-type rope --transformer-impl local",
)


@pytest.mark.parametrize("line", LINES)
def test_flags_mean_the_same_without_megatron(line: str) -> None:
    words = [*TINY, *line.split()]
    ours = read_by_commands(words)
    assert as_megatron_reads(words, ours) == counted(ours)


def actions() -> list[Action]:
    """Return what Megatron's parser reads, by flags that are its own."""
    parser = megatron_arguments.add_megatron_arguments(ArgumentParser(allow_abbrev=False, add_help=False))
    return [action for action in parser._actions if action.dest not in flag_table.names()]


def test_every_flag_of_megatron_is_known() -> None:
    """Arguments of a new release become a row, or a name in flag_effects.toml, by what their code does."""
    flags = [flag for action in actions() for flag in action.option_strings if flag.startswith("--")]
    assert not [flag for flag in flags if flag not in flag_table.known_flags()]


@pytest.mark.skipif(megatron_release() != NEWEST, reason="the rows are those of the newest release")
def test_the_rows_are_what_megatrons_parser_has() -> None:
    theirs = {flag: action for action in actions() for flag in action.option_strings}
    defaults = {name: getattr(value, "name", value) for name, value in vars(read_by_megatron([])).items()}
    for row in flag_table.rows():
        for action in (theirs[flag] for flag in row["flags"]):
            assert (action.dest, defaults[action.dest]) == (row["dest"], row["default"]), row
            if "sets" not in row:
                choices = action.choices and [getattr(choice, "name", choice) for choice in action.choices]
                assert (action.nargs, choices) == (row.get("nargs"), row.get("choices")), row
                assert row.get("type") in (None, "pattern", getattr(action.type, "__name__", None)), row
            elif not isinstance(action, BooleanOptionalAction):
                assert (action.nargs, action.const) == (0, row["sets"]), row


def models() -> dict[str, GivenModel]:
    """The named models, and those of ``tests.support.model_configs``."""
    files = {name: value for name, value in vars(model_configs).items() if name.isupper()}
    found = {name: described.named(name).described for name in described.names()}
    return found | {name: config_json.read(value) for name, value in files.items()}


MODELS = models()


@cache
def configs() -> dict[str, dict[str, Any]]:
    """What Megatron configures each of ``MODELS`` with, in one process."""
    lines = [[*spelled(model.values), "--micro-batch-size", "1"] for model in MODELS.values()]
    return dict(zip(MODELS, configured([[*line, *missing(line)] for line in lines]), strict=True))


OTHERWISE_SAID = {"num_query_groups", "window_size", "no_rope_freq", "moe_router_load_balancing_type"}


@pytest.mark.parametrize("name", MODELS)
def test_megatron_configures_the_model_that_was_described(name: str) -> None:
    config, values = configs()[name], MODELS[name].values
    assert config["num_layers"] == layers(values)
    for field, value in values.items():
        if value is not None and field in config and field not in OTHERWISE_SAID:
            assert config[field] == value, field
    assert config["num_moe_experts"] == values.get("num_experts")
    assert config["gated_linear_unit"] == ("swiglu" in values or "quick_geglu" in values)
    assert config["num_query_groups"] == (values.get("num_query_groups") or values["num_attention_heads"])
    every = values.get("no_rope_freq")
    assert config["no_rope_freq"] == (
        every and [int(number % every == 0) for number in range(1, layers(values) + 1)]
    )
    window = values.get("window_size")
    assert config["window_size"] == (window and tuple(map(int, window.split(","))))


def layers(values: Mapping[str, Any]) -> int:
    """The layers of a model, without those that predict further tokens."""
    return values.get("num_layers") or len(values["hybrid_layer_pattern"].partition("/")[0])


IN_MAKE_TEST = ("nemotron-3", "v-half")
CASES = [(model, schedule) for model in FLAGS for schedule in ("v-half", "zb-h1", "flex")]
LIMIT = {"flex": ("--pipeline-memory-limit", "0.8")}


@pytest.mark.parametrize(
    ("model", "schedule"), [case if case == IN_MAKE_TEST else wide(case) for case in CASES]
)
def test_trains_as_stock(model: str, schedule: str) -> None:
    words = flags(model, stages=2 if schedule == "zb-h1" else 4)
    words += ["--pipeline-model-parallel-size", "2", "--clip-grad", "0"]
    ours = run(2, [*words, "--pipeline-schedule", schedule, *LIMIT.get(schedule, ())])
    assert_same_bits(ours, run(2, words))


@pytest.mark.parametrize("model", [wide(model) for model in FLAGS if "nemotron" not in model])
def test_trains_in_pairs_as_stock(model: str) -> None:
    """Megatron has plans for these; hybrid models have none."""
    words = [
        *flags(model, stages=4),
        *["--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "2"],
    ]
    words += ["--bf16", "--accumulate-allreduce-grads-in-fp32", "--clip-grad", "0"]
    ours = run(4, [*words, "--overlap-moe-expert-parallel-comm", "--pipeline-schedule", "dualpipe-v"])
    assert_same_bits(ours, stock(4, *words, "--num-layers-per-virtual-pipeline-stage", "2"))
