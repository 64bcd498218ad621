"""The Llama whose weights frameworks import, export and train in these tests."""

from transformers import LlamaConfig

LLAMA = LlamaConfig(
    architectures=["LlamaForCausalLM"],
    num_hidden_layers=8,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
    max_position_embeddings=64,
)
