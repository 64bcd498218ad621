"""Command lines that are read without Megatron's parser, and written."""

import pytest

from megatron_pp_ext.job import flag_table
from megatron_pp_ext.job.flag_table import hint


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--num-layers 8 --hidden-dropout 0.25", {"num_layers": 8, "hidden_dropout": 0.25}),
        ("--bf16 --num-layers=8", {"bf16": True, "num_layers": 8}),
        ("--recompute-modules mlp core_attn", {"recompute_modules": ["mlp", "core_attn"]}),
        (
            "--pipeline-vocabulary auto --pipeline-schedule ZBV",
            {"pipeline_vocabulary": "auto", "pipeline_schedule": "v-zb"},
        ),
        ("--lr 0.01 --train-iters 5 --mock-data", {"lr": 0.01, "train_iters": 5, "mock_data": True}),
        ("--moe-layer-freq ([0]*1+[1]*2)*2", {"moe_layer_freq": [0, 1, 1, 0, 1, 1]}),
        ("--moe-layer-freq 2*[0]+[1,0]*1", {"moe_layer_freq": [0, 0, 1, 0]}),
        ("--moe-layer-freq 2 --disable-bias-linear", {"moe_layer_freq": 2, "add_bias_linear": False}),
    ],
)
def test_what_is_given_is_read_and_the_rest_is_as_it_was(words: str, found: dict[str, object]) -> None:
    start = {"num_layers": 3, "hidden_size": 64}
    defaults = vars(flag_table.parse([], {})[0])
    assert vars(flag_table.parse(words.split(), start)[0]) == {**defaults, **start, **found}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--bf16 yes", "yes follows no flag that takes it"),
        ("--num-layers", "--num-layers: expected one argument"),
        ("--num-layers 8 9", "9 follows no flag"),
        ("word", "word follows no flag"),
        ("--pipeline-vocabulary all", "invalid choice: 'all'"),
        ("--num-layers eight", "invalid int value: 'eight'"),
        ("--lr fast", "invalid float value: 'fast'"),
        ("--moe-layer-freq [1,x]", "invalid pattern value"),
        ("--moe-layer-freq [1,,]", "invalid pattern value"),
        ("--moe-layer-freq [9**9**9]", "invalid pattern value"),
        ("--moe-layer-freq [[0]*9]*9", "invalid pattern value"),
        ("--moe-layer-freq " + "[" * 5000, "invalid pattern value"),
        ("--moe-layer-freq " + "([0]" + "+[0]" * 5000 + ")", "invalid pattern value"),
        ("--moe-layer-freq ([0]*9999999999)", "it makes more than 16,384 numbers"),
        ("--moe-layer-freq 9999*([0,1]*9999)", "it makes more than 16,384 numbers"),
        ("--moe-layer-freq [0]*16384+[1]", "it makes more than 16,384 numbers"),
        ("--num-layers 16385", "--num-layers has more than 16,384"),
        ("--pipeline-model-parallel-size 999999999", "--pipeline-model-parallel-size has more than 16,384"),
    ],
)
def test_what_megatron_does_not_accept_is_refused(words: str, message: str) -> None:
    with pytest.raises(ValueError, match="in the model's flags: ") as error:
        flag_table.unknown(flag_table.parse(words.split(), {})[1])
    assert message in str(error.value)


def test_what_no_row_has_is_passed_over_and_unknown_where_it_may_have_an_effect() -> None:
    words = ["--mine", "3", "--num-layers", "8", "--log-throughput", "--no-save-optim", "--num-layer=9"]
    args, rest = flag_table.parse(words, {})
    assert args.num_layers == 8 and rest[:2] == ["--mine", "3"]
    assert flag_table.unknown(rest) == ["--mine", "--num-layer"]
    line = "--num-layer is none of Megatron's: did you mean '--num-layers'"
    assert line in str(flag_table.UnknownFlag("--num-layer=9"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_layers": 8, "bf16": True, "fp16": False, "hidden_dropout": None}, "--num-layers 8 --bf16"),
        ({"moe_layer_freq": [0, 1, 1]}, "--moe-layer-freq [0]*1+[1]*2"),
        ({"recompute_modules": ["mlp", "core_attn"]}, "--recompute-modules mlp core_attn"),
        ({"add_bias_linear": False}, "--disable-bias-linear"),
        ({"add_bias_linear": True}, ""),
        ({"fp8": "hybrid", "layernorm_epsilon": 3}, "--fp8-format hybrid --norm-epsilon 3"),
    ],
)
def test_arguments_are_spelled_as_they_are_read(values: dict[str, object], words: str) -> None:
    assert flag_table.spelled(values) == words.split()


KNOWN = (
    "--num-layers",
    "--micro-batch-size",
    "--pipeline-model-parallel-size",
    "--pipeline-schedule",
    "--overlap-param-gather",
    "--use-mcore-models",
    "--muon-nesterov",
)


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--num-layer", "--num-layers"),
        ("--num_layers", "--num-layers"),
        ("--micro-batchsize", "--micro-batch-size"),
        ("--pipeline-paralell-size", "--pipeline-model-parallel-size"),
        ("--pipeline-shedule", "--pipeline-schedule"),
        ("--muon-use-nesterov", "--muon-nesterov"),
    ],
)
def test_a_word_may_be_mistyped_missing_or_too_many(flag: str, meant: str) -> None:
    assert hint(flag, KNOWN, "see --help") == f"did you mean {meant!r}?"


@pytest.mark.parametrize("flag", ["--delay-param-gather", "--use-legacy-model", "--swiglu"])
def test_another_word_means_another_flag(flag: str) -> None:
    assert hint(flag, KNOWN, "see --help") == "see --help"


def test_a_flag_that_is_gone_is_left_out() -> None:
    assert hint("--use-legacy-models", KNOWN, "see --help").endswith("leave it out")
