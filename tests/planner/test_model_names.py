"""Models by name and by Hugging Face config.json: their sizes, and why some are refused."""

import json

import pytest

from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner import described, hugging_face, model_names
from megatron_pp_ext.planner.step.model_parts import model_parts
from megatron_pp_ext.planner.step.stage_parts import stage_parts

OFFERED = [name for name in model_names.names() if not model_names.named(name).refusal]
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8,
    "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 131072,
}  # fmt: skip


@pytest.mark.parametrize("name", OFFERED)
def test_a_named_model_has_as_many_parameters_as_published(name):
    """To the three digits that are published; the vocabulary's padding and routers are too few to show."""
    args = described.read(["--micro-batch-size", "1"], name).args
    model = model_parts(Job.of(args), vocabulary=args.vocab_size)
    (part,) = stage_parts(args, model, [args.num_layers])
    assert f"{part.parameters + part.expert_parameters:.3g}" == f"{model_names.named(name).parameters:.3g}"


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


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "deepseek_v3"}, "is not supported: it has multi-latent attention"),
        ({"model_type": "gemma2"}, "sliding-window attention, which the planner does not count"),
        ({"model_type": "qwen3_moee"}, "did you mean 'qwen3_moe'?"),
        ({"model_type": ["llama"]}, """model_type ["llama"] is not supported, only """),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu", but only "silu" is supported'),
        ({"attention_bias": True}, "attention_bias is true, but only false is supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling 'yarn' is not supported"),
        ({"rope_scaling": "yarn"}, 'rope_scaling is "yarn", but must be an object'),
        ({"hidden_size": None}, "hidden_size is missing: add it"),
        ({"num_hidden_layers": "4"}, 'num_hidden_layers is "4", but must be a whole number'),
        ({"model_type": "mixtral"}, "num_local_experts is missing"),
        ({"rope_theta": float("nan")}, "rope_theta is NaN, but must be a finite number of 0 or more"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is Infinity, but must be a finite number"),
    ],
)
def test_what_is_not_supported_is_refused_by_the_reason(changed, message, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, **changed}))
    with pytest.raises(ValueError) as error:
        model_names.read(str(file))
    assert str(error.value).startswith(f"{file}: ")
    assert message in str(error.value)


@pytest.mark.parametrize("more", [{}, {"model_type": None}, {"architectures": ["LlamaForCausalLM"]}])
def test_a_config_that_does_not_say_its_type_is_told_so(more, tmp_path):
    file = tmp_path / "config.json"
    untyped = {name: size for name, size in LLAMA.items() if name != "model_type"}
    file.write_text(json.dumps({**untyped, **more}))
    with pytest.raises(ValueError, match=r"config\.json: model_type is missing: add it, one of gpt2, llama"):
        model_names.read(str(file))


def test_a_sliding_window_counts_only_where_a_sequence_is_longer(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, "model_type": "mistral", "sliding_window": 4096}))
    assert described.read([], str(file)).args.seq_length == 4096
    with pytest.raises(ValueError, match=r"is longer than the sliding window of .*, 4096 tokens"):
        described.read(["--seq-length=8192"], str(file))
    assert hugging_face.sliding_window({"model_type": "qwen2", "sliding_window": 4096}) is None


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
    with pytest.raises(ValueError, match=r"--model deepseek-v3: .*multi-latent attention"):
        model_names.read("deepseek-v3")
    with pytest.raises(ValueError, match=r"nowhere\.json: No such file"):
        model_names.read("nowhere.json")
