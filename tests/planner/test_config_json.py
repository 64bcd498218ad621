"""Hugging Face's config.json of today's families: the arguments that each becomes, or why none does."""

import pytest

from megatron_pp_ext.job.flag_table import spelled
from megatron_pp_ext.planner.hugging_face import config_json
from megatron_pp_ext.planner.hugging_face.config_keys import frequency
from tests.support.model_configs import (
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    DOTS_1,
    GEMMA_2_9B,
    GEMMA_3_27B,
    GLM_5,
    GLM_45_AIR,
    GPT_2,
    GPT_OSS_20B,
    KIMI_K2,
    KIMI_K25,
    LLAMA,
    LLAMA_4_MAVERICK,
    MINIMAX_M2,
    MINITRON,
    MISTRAL_7B,
    MIXTRAL,
    NEMOTRON_3_NANO,
    NEMOTRON_3_SUPER,
    PHI_3_MINI,
    QWEN2_7B,
    QWEN2_MOE,
    QWEN2_VL,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN35_27B,
    QWEN35_MOE,
    SMOLLM3,
    Config,
    old_keys,
)

LATENT = (
    "--multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --qk-layernorm"
)
SIGMOID = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-grouped-gemm"
DELTA = "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --attention-output-gate"

ACCEPTED: list[tuple[str, Config, str, str]] = [
    (
        "llama",
        LLAMA,
        "--num-query-groups 8 --swiglu --disable-bias-linear --rotary-base 500000",
        "--qk-layernorm",
    ),
    ("gpt2", GPT_2, "--num-layers 12 --hidden-dropout 0.1 --ffn-hidden-size 3072", "--swiglu"),
    ("ernie-4.5", {**LLAMA, "model_type": "ernie4_5"}, "--swiglu", "--untie-embeddings-and-output-weights"),
    ("gemma", {**LLAMA, "model_type": "gemma", "hidden_act": "gelu"}, "--kv-channels 256", "--swiglu"),
    ("qwen3", {**LLAMA, "model_type": "qwen3"}, "--qk-layernorm", "--add-qkv-bias"),
    (
        "mimo",
        {**LLAMA, "model_type": "mimo", "num_nextn_predict_layers": 1},
        "--mtp-num-layers 1",
        "--add-qkv-bias",
    ),
    ("ministral", {**MISTRAL_7B, "model_type": "ministral"}, "--window-size 4095,0", "--add-qkv-bias"),
    ("ministral-3", {**LLAMA, "model_type": "ministral3"}, "--swiglu", "--window-size"),
    ("olmoe", {**MIXTRAL, "model_type": "olmoe"}, "--qk-layernorm --moe-router-pre-softmax", "--window-size"),
    (
        "dots.llm1",
        DOTS_1,
        f"{SIGMOID} --qk-layernorm --moe-layer-freq [0]*1+[1]*61",
        "--group-query-attention",
    ),
    ("glm-4.7-flash", {**DEEPSEEK_V3, "model_type": "glm4_moe_lite"}, LATENT, "--group-query-attention"),
    ("qwen3.5-27b", QWEN35_27B, f"{DELTA} --mtp-num-layers 1 --ffn-hidden-size 17408", "--num-experts"),
    ("mistral", MISTRAL_7B, "--window-size 4095,0", "--window-attn-skip-freq"),
    ("mixtral", MIXTRAL, "--num-experts 8 --moe-ffn-hidden-size 14336 --moe-grouped-gemm", "--window-size"),
    ("phi-3", PHI_3_MINI, "--window-size 2046,0 --hidden-dropout 0.0", "--group-query-attention"),
    ("smollm3", SMOLLM3, "--no-rope-freq 4", "--untie-embeddings-and-output-weights"),
    ("minitron", MINITRON, "--squared-relu --apply-layernorm-1p --rotary-percent 0.5", "--swiglu"),
    ("qwen2", QWEN2_7B, "--add-qkv-bias --disable-bias-linear", "--window-size"),
    (
        "qwen2-moe",
        QWEN2_MOE,
        "--moe-shared-expert-intermediate-size 20480 --moe-shared-expert-gate --moe-router-pre-softmax "
        "--moe-grouped-gemm --add-qkv-bias",
        "--moe-layer-freq",
    ),
    ("qwen2-vl", QWEN2_VL, "--add-qkv-bias --position-embedding-type rope", "--window-size"),
    (
        "qwen3-moe",
        QWEN3_MOE,
        "--qk-layernorm --moe-grouped-gemm --kv-channels 128",
        "--moe-router-pre-softmax",
    ),
    (
        "qwen3-next",
        QWEN3_NEXT,
        f"{DELTA} --rotary-percent 0.25 --apply-layernorm-1p --moe-shared-expert-gate --qk-layernorm "
        "--linear-num-value-heads 32 --moe-grouped-gemm",
        "--mtp-num-layers",
    ),
    (
        "qwen3.5-moe",
        QWEN35_MOE,
        f"{DELTA} --mtp-num-layers 1 --rotary-percent 0.25 --rotary-base 10000000 --num-experts 256",
        "--moe-layer-freq",
    ),
    (
        "deepseek-v2-lite",
        DEEPSEEK_V2_LITE,
        f"{LATENT} --moe-layer-freq [0]*1+[1]*26 --moe-shared-expert-intermediate-size 2816 "
        "--moe-router-pre-softmax --rope-type yarn",
        "--q-lora-rank",
    ),
    (
        "deepseek-v3",
        DEEPSEEK_V3,
        f"{LATENT} {SIGMOID} --q-lora-rank 1536 --v-head-dim 128 --moe-layer-freq [0]*3+[1]*58 "
        "--moe-shared-expert-intermediate-size 2048 --mtp-num-layers 1 --moe-router-num-groups 8 "
        "--moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5 --rotary-scaling-factor 40.0",
        "--group-query-attention",
    ),
    (
        "deepseek-v3.2",
        DEEPSEEK_V32,
        f"{LATENT} --experimental-attention-variant dsa --dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 "
        "--dsa-indexer-topk 2048",
        "--dsa-indexer-topk-freq",
    ),
    ("kimi-k2", KIMI_K2, f"{LATENT} {SIGMOID} --num-experts 384", "--mtp-num-layers"),
    ("kimi-k2.5", KIMI_K25, f"{LATENT} {SIGMOID} --num-experts 384", "--moe-router-num-groups"),
    (
        "glm-5",
        GLM_5,
        "--experimental-attention-variant dsa --qk-head-dim 192 --v-head-dim 256 --rope-type rope "
        "--no-rope-fusion --rotary-base 1000000",
        "--rotary-scaling-factor",
    ),
    (
        "glm-4.5-air",
        GLM_45_AIR,
        f"{SIGMOID} --add-qkv-bias --rotary-percent 0.5 --kv-channels 128 --moe-layer-freq [0]*1+[1]*45 "
        "--mtp-num-layers 1 --moe-shared-expert-intermediate-size 1408",
        "--qk-layernorm",
    ),
    (
        "gpt-oss-20b",
        GPT_OSS_20B,
        "--softmax-type learnable --window-size 127,0 --window-attn-skip-freq 2 --quick-geglu "
        "--glu-linear-offset 1.0 --activation-func-clamp-value 7.0 --add-qkv-bias "
        "--position-embedding-type yarn --rotary-scaling-factor 32.0 --moe-ffn-hidden-size 2880",
        "--disable-bias-linear",
    ),
    ("minimax-m2", MINIMAX_M2, f"{SIGMOID} --qk-layernorm --rotary-percent 0.5", "--mtp-num-layers"),
    (
        "gemma-2",
        GEMMA_2_9B,
        "--quick-geglu --window-size 4095,0 --window-attn-skip-freq 2 --apply-layernorm-1p --kv-channels 256",
        "--untie-embeddings-and-output-weights",
    ),
    (
        "gemma-3",
        GEMMA_3_27B,
        "--window-size 1023,0 --window-attn-skip-freq 6 --qk-layernorm --vocab-size 262208 "
        "--rotary-seq-len-interpolation-factor 8",
        "--untie-embeddings-and-output-weights",
    ),
    (
        "nemotron-3-nano",
        NEMOTRON_3_NANO,
        f"{SIGMOID} --hybrid-layer-pattern MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME "
        "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec --mamba-num-heads 64 "
        "--mamba-state-dim 128 --squared-relu --moe-shared-expert-intermediate-size 3712 "
        "--position-embedding-type none",
        "--num-layers",
    ),
    (
        "nemotron-3-super",
        NEMOTRON_3_SUPER,
        "--hybrid-layer-pattern ME*EME*E/*E/*E --mtp-num-layers 2 --mtp-use-repeated-layer "
        "--moe-latent-size 1024 --moe-router-topk 22",
        "--num-layers",
    ),
    (
        "llama-4-maverick",
        LLAMA_4_MAVERICK,
        f"--moe-layer-freq {'+'.join(['[0]*1+[1]*1'] * 24)} --moe-shared-expert-intermediate-size 8192 "
        "--ffn-hidden-size 16384 --moe-apply-probs-on-input --no-rope-freq 4 --rotary-interleaved",
        "--qk-l2-norm",
    ),
]


def words(config: Config) -> str:
    """The flags of ``config``, with spaces around each."""
    return f" {' '.join(spelled(config_json.read(config).values))} "


@pytest.mark.parametrize(
    ("config", "there", "not_there"), [row[1:] for row in ACCEPTED], ids=[row[0] for row in ACCEPTED]
)
def test_a_config_becomes_the_flags_that_train_it(config: Config, there: str, not_there: str) -> None:
    found = words(config)
    for flag in there.split(" --"):
        assert f" --{flag.removeprefix('--')} " in found
    assert f" {not_there} " not in found


EVERY_TYPE = {*config_json.TYPES, *config_json.SAME}


def test_no_type_is_both_known_and_refused() -> None:
    assert EVERY_TYPE.isdisjoint(config_json.REFUSED)
    assert set(config_json.SAME.values()) <= set(config_json.TYPES)


@pytest.mark.parametrize("nested", ["text_config", "llm_config", "language_config"])
def test_of_several_kinds_of_input_the_language_model_is_described(nested: str) -> None:
    described = config_json.read({"model_type": "some_vlm", "vision_config": {"depth": 2}, nested: LLAMA})
    assert dict(described.values) == dict(config_json.read(LLAMA).values)
    assert described.notes == [f"the language model alone is described ({nested}), without its encoders"]


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "LlamaForConditionalGeneration", "GPT2LMHeadModel", "InternVLChatModel", "MiniCPMV"],
)
def test_a_class_with_a_head_of_the_vocabulary_is_that_of_a_language_model(architecture: str) -> None:
    config = {**LLAMA, "architectures": [architecture]}
    assert dict(config_json.read(config).values) == dict(config_json.read(LLAMA).values)


@pytest.mark.parametrize("has_types", [False, True])
def test_of_a_model_that_speaks_the_thinker_is_described(has_types: bool) -> None:
    """Its parts may have no model_type of their own."""
    text, thinker = without(QWEN3_MOE, "model_type"), {"model_type": "qwen3_omni_moe_thinker"}
    if has_types:
        text["model_type"] = "qwen3_omni_moe_text"
    described = config_json.read(
        {
            "model_type": "qwen3_omni_moe",
            "thinker_config": {**(thinker if has_types else {}), "audio_config": {}, "text_config": text},
            "talker_config": {"text_config": {**LLAMA, "num_hidden_layers": 2}},
            "code2wav_config": {},
        }
    )
    assert dict(described.values) == dict(config_json.read(QWEN3_MOE).values)
    assert described.notes[0].endswith("(thinker_config), without its encoders and its talker")


def test_tied_embeddings_may_be_said_beside_the_language_model() -> None:
    outer = {"model_type": "some_vlm", "text_config": LLAMA, "tie_word_embeddings": True}
    assert not config_json.read(outer).values["untie_embeddings_and_output_weights"]


@pytest.mark.parametrize(
    ("config", "notes"),
    [
        (GEMMA_2_9B, ["norms behind attention and MLPs", "attn_logit_softcapping is left out", "--quick-g"]),
        (MINIMAX_M2, ["--mtp-num-layers 3", "norms of queries and keys by head"]),
        *((config, []) for config in (LLAMA, DEEPSEEK_V3, QWEN3_NEXT, NEMOTRON_3_NANO)),
    ],
)
def test_what_no_flag_says_is_said(config: Config, notes: list[str]) -> None:
    """Nothing is said of a model that Megatron builds."""
    found = config_json.read(config).notes
    assert bool(found) is bool(notes)
    assert all(any(note in one for one in found) for note in notes)


COPIES: list[Config] = [
    {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}},
    {"quantization_config": {"quant_method": "fp8"}, "torch_dtype": "float8_e4m3fn"},
    {"dtype": "float16", "use_cache": False, "eos_token_id": [1, 2], "initializer_range": 0.006},
    old_keys,
    {"pretraining_tp": 8, "auto_map": {"AutoConfig": "a.B"}, "head_dim": None, "rope_scaling": None},
]


@pytest.mark.parametrize("more", COPIES)
def test_a_copy_in_other_numbers_is_the_same_model(more: Config) -> None:
    assert words({**LLAMA, **more}) == words(LLAMA)


def without(config: Config, *names: str) -> Config:
    return {name: value for name, value in config.items() if name not in names}


REFUSED: list[tuple[Config, str]] = [
    # types
    ({**LLAMA, "model_type": "qwen3_moee"}, "did you mean 'qwen3_moe'?"),
    ({**LLAMA, "model_type": "lama"}, "did you mean 'llama'?"),
    ({**LLAMA, "model_type": "llama5"}, 'model_type "llama5" is not known here: give Megatron\'s flags'),
    ({**LLAMA, "model_type": "qwen4"}, 'model_type "qwen4" is not known here: give Megatron\'s flags'),
    ({**LLAMA, "model_type": ["llama"]}, 'model_type ["llama"] is not known here'),
    (without(LLAMA, "model_type"), "model_type is missing: add it, one of deepseek_v2, deepseek_v3"),
    ({**LLAMA, "model_type": None}, "model_type is missing"),
    ({**LLAMA, "model_type": "cohere2"}, "attention and MLP stand side by side"),
    ({**LLAMA, "model_type": "olmo2"}, "its norms stand behind attention and MLPs"),
    ({**LLAMA, "model_type": "granite"}, "it multiplies embeddings, residuals or logits"),
    ({**LLAMA, "model_type": "kimi_linear"}, "linear attention that Megatron does not have"),
    ({**LLAMA, "model_type": "zamba2"}, "kinds that Megatron's hybrid models do not have"),
    ({**LLAMA, "model_type": "gemma3n"}, "embeddings by layer"),
    ({**LLAMA, "model_type": "nemotron-nas"}, "--heterogeneous-layers-config-path FILE"),
    ({**LLAMA, "model_type": "minimax_m3_vl"}, "its sparse attention chooses blocks of grouped keys"),
    ({"model_type": "step3p7", "text_config": {**LLAMA, "model_type": "step3p7_text"}}, "numbers of heads"),
    ({**LLAMA, "model_type": "t5"}, "no decoder-only model"),
    ({"model_type": "llava", "text_config": {**LLAMA, "model_type": "phi"}}, "stand side by side"),
    # values that a key cannot have
    ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads is 3, but must divide num_attention_heads 32"),
    ({**LLAMA, "num_key_value_heads": 64}, "num_key_value_heads is 64, but must divide"),
    ({**LLAMA, "num_key_value_heads": 0}, "_heads is 0, but must be a whole number of 1 or more"),
    ({**LLAMA, "attention_dropout": 2}, "is 2, but must be a finite number of 0 or more and below"),
    ({**LLAMA, "attention_dropout": "0.1"}, 'attention_dropout is "0.1", but must be a finite number'),
    ({**LLAMA, "rope_theta": float("nan")}, "rope_theta is NaN, but must be a finite number"),
    ({**LLAMA, "rms_norm_eps": float("inf")}, "rms_norm_eps is Infinity, but must be a finite number"),
    ({**LLAMA, "tie_word_embeddings": "false"}, 'tie_word_embeddings is "false", but must be true or false'),
    ({**LLAMA, "attention_bias": 1}, "attention_bias is 1, but must be true or false"),
    ({**LLAMA, "num_hidden_layers": "32"}, 'num_hidden_layers is "32", but must be a whole number'),
    ({**LLAMA, "hidden_size": 4096.0}, "hidden_size is 4096.0, but must be a whole number"),
    ({**LLAMA, "hidden_size": True}, "hidden_size is true, but must be a whole number"),
    ({**LLAMA, "hidden_size": 4100}, "hidden_size 4100 is not divisible by num_attention_heads 32"),
    ({**LLAMA, "rope_scaling": "yarn"}, 'rope_scaling is "yarn", but must be an object'),
    ({**LLAMA, "partial_rotary_factor": 1.5}, "factor is 1.5, but must be above 0 and at most 1"),
    (without(LLAMA, "hidden_size"), "hidden_size is missing: add it"),
    (without(MIXTRAL, "num_local_experts"), "num_local_experts or n_routed_experts"),
    ({**MIXTRAL, "num_experts_per_tok": 9}, "9 experts a token are more than the 8 that there are"),
    ({**GPT_OSS_20B, "experts_per_token": 8}, "experts_per_token is 8, but num_experts_per_tok is 4"),
    ({**GPT_OSS_20B, "layer_types": ["full_attention"] * 3}, "is a list of 3, but must be a list with"),
    ({**GPT_OSS_20B, "layer_types": ["mamba"] * 24}, 'layer_types has "mamba", but only "sliding_attention"'),
    ({**GLM_5, "qk_head_dim": 192}, "qk_head_dim is 192, but must be 256"),
    ({**NEMOTRON_3_NANO, "num_hidden_layers": 50}, "num_hidden_layers is 50, but the pattern has 52 layers"),
    ({**NEMOTRON_3_NANO, "hybrid_override_pattern": "MX*"}, "pattern is 'MX*', but must have M"),
    ({**NEMOTRON_3_NANO, "num_nextn_predict_layers": 1}, "mtp_hybrid_override_pattern is missing"),
    # what Megatron's flags do not say
    ({**LLAMA, "hidden_act": "gelu"}, 'hidden_act is "gelu", but only "silu" or "swish" is supported'),
    ({**LLAMA, "attention_bias": True}, "attention_bias is true and mlp_bias is not"),
    ({**LLAMA, "rope_scaling": {"rope_type": "longrope"}}, 'rope_scaling "longrope" is not supported'),
    ({**PHI_3_MINI, "embd_pdrop": 0.1}, "embd_pdrop is 0.1, but must be 0.0, since Megatron has one dropout"),
    ({**NEMOTRON_3_NANO, "conv_kernel": 8}, "conv_kernel is 8, but must be 4"),
    ({**MINIMAX_M2, "attn_type_list": [0] * 62}, "Megatron has no lightning attention"),
    ({**LLAMA_4_MAVERICK["text_config"], "num_experts_per_tok": 2}, "_per_tok is 2, but must be 1"),
    ({**DEEPSEEK_V3, "scoring_func": "softmax"}, 'scoring_func is "softmax", but only "sigmoid"'),
    ({**QWEN35_MOE["text_config"], "mtp_use_dedicated_embeddings": True}, "_embeddings is true"),
    ({**LLAMA, "add_cross_attention": True}, "add_cross_attention is true, but must be false"),
    ({**QWEN3_MOE, "qkv_bias": True}, "qkv_bias is true, but must be false"),
    ({**QWEN3_MOE, "shared_expert_intermediate_size": 8}, "_size is 8, but must be 0"),
    ({**QWEN35_27B, "output_gate_type": "tanh"}, 'output_gate_type is "tanh", but only "sigmoid"'),
    ({**GLM_5, "index_topk_pattern": "FX" * 39}, 'index_topk_pattern is "FXFX'),
    # outputs other than the vocabulary
    (
        {**LLAMA, "architectures": ["LlamaForSequenceClassification"], "num_labels": 1},
        'architectures has "LlamaForSequenceClassification", with a head of 1 label, and Megatron\'s GPT',
    ),
    ({**LLAMA, "architectures": ["LlamaForTokenClassification"]}, "with a head of 2 labels, and"),
    (
        {
            **LLAMA,
            "architectures": ["MyForSequenceClassification"],
            "id2label": {"0": "a", "1": "b", "2": "c"},
        },
        "with a head of 3 labels, and",
    ),
    ({**LLAMA, "architectures": ["LlamaForQuestionAnswering"]}, "with no head of the vocabulary, and"),
    ({**LLAMA, "architectures": ["LlamaForProcessRewardModel"]}, "with no head of the vocabulary, and"),
    ({**LLAMA, "architectures": ["LlamaModel"]}, "with no head of the vocabulary, and"),
    (
        {
            "model_type": "vlm",
            "architectures": ["VlmForSequenceClassification"],
            "text_config": {**LLAMA, "architectures": None},
        },
        'architectures has "VlmForSequenceClassification"',
    ),
    # keys that nothing knows for the type
    ({**LLAMA, "n_shared_experts": 1}, "n_shared_experts is 1, but no such key is known for this model_type"),
    ({**LLAMA, "layer_types": ["full_attention"] * 32}, "layer_types is "),
    ({**LLAMA, "logits_scaling": 8.0}, "logits_scaling is 8.0, but Megatron's flags have no multipliers"),
    ({**LLAMA, "block_configs": [{}]}, "Megatron reads such layers from the file"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_what_is_wrong_or_unknown_is_refused_in_one_line(config: Config, message: str) -> None:
    with pytest.raises(ValueError) as error:
        config_json.read(config)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert ": " in str(error.value)


def flat(config: Config) -> Config:
    """The language model of ``config``."""
    return dict(config.get("text_config", config))


BY_TYPE = {flat(config)["model_type"]: flat(config) for _, config, _, _ in ACCEPTED}


@pytest.mark.parametrize("kind", config_json.TYPES)
def test_a_key_that_nobody_knows_is_refused_by_its_name_for_each_type(kind: str) -> None:
    with pytest.raises(ValueError, match="number_of_wings is 2, but no such key is known"):
        config_json.read({**BY_TYPE[kind], "number_of_wings": 2})


def test_a_window_of_some_layers_is_a_number_where_their_pattern_repeats() -> None:
    assert frequency([1, 0, 1, 0], marked=0) == 2
    assert frequency([1, 1, 0, 1, 1], marked=0) == 3
    assert frequency([1, 1, 1, 0, 0], marked=0) == [1, 1, 1, 0, 0]
    assert frequency([0, 0, 0, 1], marked=1) == 4
    assert frequency([0, 0, 0], marked=1) == [0, 0, 0]


def test_layers_that_share_a_choice_of_tokens_do_so_with_a_period() -> None:
    sharing = ["full"] * 3 + (["shared"] * 3 + ["full"]) * 18 + ["shared"] * 3
    found = config_json.read({**GLM_5, "indexer_types": sharing}).values
    assert (found["dsa_indexer_topk_freq"], found["dsa_indexer_skip_topk_offset"]) == (4, 3)
    with pytest.raises(ValueError, match="index_topk_pattern has no period"):
        config_json.read({**GLM_5, "index_topk_pattern": f"S{'F' * 76}S"})
    with pytest.raises(ValueError, match="indexer_types has no period"):
        config_json.read({**GLM_5, "indexer_types": ["shared", *["full"] * 76, "shared"]})


def test_layers_from_a_number_on_have_a_window_as_qwen_counts_them() -> None:
    windowed = {**QWEN2_7B, "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}
    found = config_json.read(windowed).values
    assert found["window_size"] == "4095,0"
    assert found["window_attn_skip_freq"] == [0] * 20 + [1] * 8


@pytest.mark.parametrize(
    ("more", "layers"),
    [
        ({"decoder_sparse_step": 2}, [0, 1] * 47),
        ({"mlp_only_layers": [0, 93]}, [0, *[1] * 92, 0]),
        ({"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 92}, [0, 0, *[1] * 92]),
    ],
)
def test_layers_with_experts_are_those_that_the_family_names(more: Config, layers: list[int]) -> None:
    assert config_json.read({**QWEN3_MOE, **more}).values["moe_layer_freq"] == layers
