"""Models by name and by Hugging Face config.json: their sizes, and why some are refused."""

import json

import pytest

from megatron_pp_ext.planner import described, model_names
from megatron_pp_ext.planner.step.model_parts import model_parts
from megatron_pp_ext.planner.step.stage_parts import stage_parts

THREE_DIGITS = 0.005
PUBLISHED = [
    ("gpt3-175b", 0, THREE_DIGITS),
    ("llama3-405b", 0, THREE_DIGITS),
    ("llama3-70b", 0, THREE_DIGITS),
    ("llama3-8b", 0, THREE_DIGITS),
    ("mixtral-8x7b", 0, THREE_DIGITS),
    ("qwen3-235b", 0, THREE_DIGITS),
    ("qwen3-30b-a3b", 0, THREE_DIGITS),
    ("qwen3-32b", 0, THREE_DIGITS),
    ("qwen3-8b", 0, THREE_DIGITS),
    ("glm-4.5", 2 * 151552 * 5120, THREE_DIGITS),  # without embedding and output layer
    ("minimax-m2", 0, 0.01),  # two digits are published
    ("llama-4-scout", 0, 0.015),  # with the vision encoder
]
"""Models, the parameters that the published number leaves out, and how far it may be off."""

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8,
    "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 131072,
}  # fmt: skip


@pytest.mark.parametrize(("name", "left_out", "within"), PUBLISHED)
def test_a_named_model_has_as_many_parameters_as_published(name, left_out, within):
    """The vocabulary's padding and routers are too few to show."""
    args = described.read(["--micro-batch-size", "1"], name).args
    model = model_parts(args, vocabulary=args.vocab_size)
    (part,) = stage_parts(args, model, [args.num_layers])
    found = part.parameters + part.expert_parameters - left_out
    assert found == pytest.approx(model_names.named(name).parameters, rel=within)


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
    assert found[0].args.attention_dropout == 0.125
    longer = described.read(["--seq-length", "200000"], str(tmp_path)).args
    assert (longer.seq_length, longer.max_position_embeddings) == (200000, 200000)


def test_an_error_names_the_file(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, "num_key_value_heads": 3}))
    with pytest.raises(ValueError, match=r"config\.json: num_key_value_heads is 3, but must divide"):
        model_names.read(str(file))


def test_sequences_are_no_longer_than_the_chunks_in_which_a_model_attends():
    assert described.read([], "llama-4-scout").args.seq_length == 8192
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
    assert found.args.seq_length == 4096
    with pytest.raises(ValueError, match="--seq-length is 8192, but 4096 behind --: leave one out"):
        described.read(spelled.split(), "llama3-8b", {"seq_length": 8192})


def test_a_name_is_forgiving_and_a_typo_is_answered():
    assert model_names.read("Llama3_8B").name == "llama3-8b"
    with pytest.raises(ValueError, match="neither a file nor a name: did you mean 'llama3-8b'"):
        model_names.read("lama3-8b")
    with pytest.raises(ValueError, match=r"nowhere\.json: No such file"):
        model_names.read("nowhere.json")
