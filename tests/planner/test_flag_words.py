"""Command lines that are read without Megatron's parser."""

import pytest

from megatron_pp_ext.planner.step import flag_words


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--num-layers 8 --hidden-dropout 0.25", {"num_layers": 8, "hidden_dropout": 0.25}),
        ("--bf16 --num-layers=8", {"bf16": True, "num_layers": 8}),
        ("--recompute-modules mlp core_attn", {"recompute_modules": ["mlp", "core_attn"]}),
        ("--pipeline-vocabulary auto", {"pipeline_vocabulary": "auto"}),
        ("--lr 0.01 --train-iters 5 --mock-data --save somewhere", {}),
    ],
)
def test_what_is_known_is_read(words: str, found: dict[str, object]) -> None:
    assert flag_words.read(words.split()) == found


@pytest.mark.parametrize(
    "words",
    [
        "--bf16 yes",
        "--num-layers",
        "--num-layers 8 9",
        "--mock-data 1",
        "--lr",
        "--no-such-flag",
        "word",
        "--pipeline-vocabulary all",
    ],
)
def test_the_rest_is_left_to_megatrons_parser(words: str) -> None:
    assert flag_words.read(words.split()) is None


@pytest.mark.parametrize("words", ["--num-layers eight", "--lr fast", "--train-iters 1.5"])
def test_what_is_no_number_is_refused(words: str) -> None:
    flag, value = words.split()
    with pytest.raises(ValueError, match=f"{flag} is .*{value}"):
        flag_words.read(words.split())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_layers": 8, "bf16": True, "fp16": False, "hidden_dropout": None}, "--num-layers 8 --bf16"),
        ({"moe_layer_freq": [0, 1, 1]}, "--moe-layer-freq [0,1,1]"),
        ({"recompute_modules": ["mlp", "core_attn"]}, "--recompute-modules mlp core_attn"),
        ({"add_bias_linear": False}, "--disable-bias-linear"),
        ({"add_bias_linear": True}, ""),
    ],
)
def test_arguments_are_spelled_as_they_are_read(values: dict[str, object], words: str) -> None:
    assert flag_words.spelled(values) == words.split()


@pytest.mark.parametrize(("name", "spelled"), sorted(flag_words.OTHER_FLAGS.items()))
def test_flags_that_are_not_called_like_their_argument(name: str, spelled: str) -> None:
    assert flag_words.spelled({name: 3})[0] == spelled
