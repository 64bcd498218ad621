"""Models by name and by Hugging Face config.json: their sizes, and how they are read."""

import json

import pytest

from megatron_pp_ext.planner import described
from megatron_pp_ext.planner.hugging_face import config_json
from megatron_pp_ext.planner.step.model_description import describe, parameters
from tests.support.model_configs import (
    DEEPSEEK_V2_LITE,
    GLM_52,
    KIMI_K2,
    MIMO_7B,
    QWEN3_CODER_480B,
    QWEN36_27B,
    old_keys,
)

ENDS_OF_GLM = 2 * 151552 * 5120
PUBLISHED = [
    ("deepseek-v3", 0, 3),
    ("gemma-2-9b", 0, 3),
    ("glm-4.5", ENDS_OF_GLM, 3),
    ("gpt-oss-120b", 0, 5),
    ("gpt-oss-20b", 0, 4),
    ("gpt3-175b", 0, 4),
    ("llama3-405b", 0, 4),
    ("llama3-70b", 0, 3),
    ("llama3-8b", 0, 3),
    ("mixtral-8x7b", 0, 3),
    ("nemotron-3-nano", 0, 3),
    ("nemotron-h-56b", 0, 2),
    ("qwen3-235b", 0, 4),
    ("qwen3-30b-a3b", 0, 3),
    ("qwen3-32b", 0, 3),
    ("qwen3-8b", 0, 3),
    ("qwen3-next-80b", 0, 2),
]
"""Models, the parameters that the published number leaves out, and its digits."""

ROUGHLY = [("kimi-k2", 0.015), ("llama-4-scout", 0.015), ("minimax-m2", 0.01)]
"""Models whose published number has less digits, or counts a vision encoder, and how far it is off."""

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8,
    "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 131072,
}  # fmt: skip


ACTIVE = [
    ("deepseek-v3", 37, 0.5),  # arXiv 2412.19437, section 4.2
    ("gpt-oss-120b", 5.13, 0.005),  # arXiv 2508.10925, table 1, which does not count the embedding here
    ("gpt-oss-20b", 3.61, 0.005),
    ("minimax-m2", 10, 0.5),  # the model card has tens of billions
    ("nemotron-3-nano", 3.2, 0.05),  # its technical report, table 1
]
"""Models, the billions of parameters that a token uses as published, and how far these are rounded."""


def counted(name):
    """The parameters of a named model; prediction layers are no part of what DeepSeek publishes."""
    job = described.read(["--make-vocab-size-divisible-by", "1"], name).job
    return parameters(job.changed(mtp_num_layers=None) if name == "deepseek-v3" else job)


@pytest.mark.parametrize(("name", "left_out", "digits"), PUBLISHED)
def test_a_named_model_has_as_many_parameters_as_published(name, left_out, digits):
    published = described.named(name).parameters
    assert f"{counted(name).parameters - left_out:.{digits}g}" == f"{published:.{digits}g}"


@pytest.mark.parametrize(("name", "billions", "rounding"), ACTIVE)
def test_a_token_uses_as_many_parameters_as_published(name, billions, rounding):
    assert counted(name).active_parameters / 1e9 == pytest.approx(billions, abs=rounding)


@pytest.mark.parametrize(
    ("config", "billions", "active", "rounding"),
    [
        (DEEPSEEK_V2_LITE, 15.7, 2.4, 0.06),  # arXiv 2405.04434, appendix B
        # Model cards, in whole billions, or tens of them.
        ({"model_type": "kimi_k25", "text_config": {**KIMI_K2, **old_keys}}, 1030, 32, 5),
        (GLM_52, 744, 40, 1),  # GLM-5's; its layers that share a choice have no indexer
        (QWEN3_CODER_480B, 480, 35, 0.5),
        (MIMO_7B, 7.6, 7, 0.05),  # the sum of its tensors, without those of the prediction layer
        (QWEN36_27B, 27, 25.6, 0.5),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_parameters_of_models_that_have_no_name_here(config, billions, active, rounding):
    values = {**config_json.read(config).values, "make_vocab_size_divisible_by": 1, "mtp_num_layers": None}
    found = parameters(describe(values))
    assert found.parameters / 1e9 == pytest.approx(billions, abs=rounding)
    assert found.active_parameters / 1e9 == pytest.approx(active, abs=rounding)


@pytest.mark.parametrize(("name", "within"), ROUGHLY)
def test_a_named_model_is_about_as_large_as_published(name, within):
    assert counted(name).parameters == pytest.approx(described.named(name).parameters, rel=within)


def test_every_named_model_is_compared_with_what_is_published():
    assert sorted(name for name, *_ in (*PUBLISHED, *ROUGHLY)) == described.names()


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ("llama3.1-405b", "llama3-405b"),
        ("Llama-3.1-405B", "llama3-405b"),
        ("llama-3-70b", "llama3-70b"),
        ("llama3_1-8b", None),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama3-70b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("deepseek-ai/DeepSeek-V3-Base", "deepseek-v3"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("my-models/llama3-8b", None),
    ],
)
def test_a_model_has_other_names(other, name):
    if name is None:
        with pytest.raises(ValueError, match="is neither a file nor a name"):
            described.read_model(other)
    else:
        assert described.read_model(other) == described.read_model(name)


def test_other_names_are_of_one_model_each():
    table = described.other_names()
    assert set(table) <= set(described.names())
    every = [*described.names(), *(other for others in table.values() for other in others)]
    assert len({*map(described.plain, every)}) == len(every)


def test_a_config_is_read_from_its_file_or_its_folder(tmp_path):
    config = {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 2, "rope_theta": 1e6}
    config["attention_dropout"] = 0.125
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    found = [described.read([], str(path)) for path in (tmp_path, tmp_path / "config.json")]
    assert found[0].words == found[1].words
    line = " ".join(found[0].words)
    for words in ("--num-query-groups 2", "--add-qkv-bias", "--rotary-base 1000000", "--seq-length 8192"):
        assert words in line
    assert "--qk-layernorm" not in line
    assert found[0].job.argument("attention_dropout") == 0.125
    longer = described.read(["--seq-length", "200000"], str(tmp_path)).job
    assert (longer.argument("seq_length"), longer.argument("max_position_embeddings")) == (200000, 200000)


def test_an_error_names_the_file(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, "num_key_value_heads": 3}))
    with pytest.raises(ValueError, match=r"config\.json: num_key_value_heads is 3, but must divide"):
        described.read_model(str(file))


@pytest.mark.parametrize("is_folder", [False, True])
def test_an_adapter_is_none_of_a_model(tmp_path, is_folder):
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({"peft_type": "LORA", "r": 8, "base_model_name_or_path": "meta/a-model"}))
    with pytest.raises(ValueError) as error:
        described.read_model(str(tmp_path if is_folder else file))
    assert str(error.value) == (
        f'{file}: is the file of an adapter ("LORA"), not of a model: give the config.json of its base '
        "model, meta/a-model"
    )


@pytest.mark.parametrize(
    ("content", "subject"),
    [
        ({"weight_map": {}, "metadata": {}}, "of a checkpoint's weights"),
        ({"tokenizer_class": "X"}, "of a tokenizer"),
        ({"do_sample": True, "transformers_version": "5"}, "of the generation of text"),
        ({"peft_type": "IA3"}, 'of an adapter ("IA3")'),
    ],
)
def test_other_files_of_a_folder_are_named(tmp_path, content, subject):
    file = tmp_path / "other.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"not of a model: give the config\.json of the model$") as error:
        described.read_model(str(file))
    assert f"is the file {subject}, " in str(error.value)


def test_positions_that_a_file_leaves_open_are_those_of_the_sequences(tmp_path):
    file = tmp_path / "config.json"
    open_ended = {name: value for name, value in LLAMA.items() if name != "max_position_embeddings"}
    file.write_text(json.dumps(open_ended))
    with pytest.raises(ValueError, match="has no --seq-length: give it"):
        described.read([], str(file))
    found = described.read([], str(file), {"seq_length": 4096})
    file.write_text(json.dumps({**LLAMA, "max_position_embeddings": 4096}))
    assert found.job == described.read([], str(file)).job
    assert "--max-position-embeddings 4096" in " ".join(found.words)


def test_what_a_file_lacks_is_not_said_to_be_replaced(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--num-layers", "2"]
    (note,) = described.read(flags, str(file), {"seq_length": 4096}).notes
    assert note.endswith("(in brackets): --num-layers 2 (4)")
    (note,) = described.read([], "llama3-8b", {"seq_length": 4096}).notes
    assert note.endswith("(in brackets): --seq-length 4096 (8192)")


def test_sequences_are_no_longer_than_the_chunks_in_which_a_model_attends():
    assert described.read([], "llama-4-scout").job.argument("seq_length") == 8192
    with pytest.raises(ValueError, match="--seq-length 8193 is longer than the chunks of 8192 tokens"):
        described.read(["--seq-length=8193"], "llama-4-scout")


def test_what_no_flag_says_is_said_with_the_name_of_the_model():
    replaced, left_out = described.read(["--num-layers", "8"], "gemma-2-9b").notes
    assert replaced == "In the place of what gemma-2-9b has (in brackets): --num-layers 8 (42)"
    assert left_out.startswith("gemma-2-9b: the norms behind attention and MLPs are left out")
    assert "; --quick-geglu stands for its gated GELU" in left_out


@pytest.mark.parametrize("spelled", ["--seq-length 4096", "--seq-length=4096"])
def test_a_size_that_is_given_twice_is_refused_where_the_two_differ(spelled):
    found = described.read(spelled.split(), "llama3-8b", {"seq_length": 4096})
    assert found.job.argument("seq_length") == 4096
    with pytest.raises(ValueError, match="--seq-length is 8192, but 4096 after --: leave one out"):
        described.read(spelled.split(), "llama3-8b", {"seq_length": 8192})


def test_a_name_is_forgiving_and_a_typo_is_answered():
    assert described.read_model("Llama3_8B").name == "llama3-8b"
    with pytest.raises(ValueError, match="neither a file nor a name: did you mean 'llama3-8b'"):
        described.read_model("lama3-8b")
    with pytest.raises(ValueError, match=r"nowhere\.json: No such file"):
        described.read_model("nowhere.json")
