"""The attention of each layer of a model; a field has the name of Megatron's argument."""

from dataclasses import dataclass

_FREQUENCY = int | tuple[int, ...]


@dataclass(frozen=True)
class Attention:
    """The kinds of attention with the sizes of each.  A size that nobody gives is 0.

    ``window_size`` are the tokens before and after a token that it sees, as a text or as two numbers;
    ``window_attn_skip_freq`` is a number k, for windows in all layers but every k-th, or a 1 for each layer
    with one, and ``linear_attention_freq`` the same for linear attention.
    """

    qk_layernorm: bool = False
    qk_l2_norm: bool = False
    attention_output_gate: bool = False
    softmax_type: str = "vanilla"
    window_size: str | tuple[int, ...] | None = None
    window_attn_skip_freq: _FREQUENCY | None = None
    multi_latent_attention: bool = False
    q_lora_rank: int = 0
    kv_lora_rank: int = 32
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    mla_down_proj_fusion: bool = False
    experimental_attention_variant: str | None = None
    dsa_indexer_n_heads: int = 0
    dsa_indexer_head_dim: int = 0
    dsa_indexer_topk: int = 0
    dsa_indexer_topk_freq: int = 1
    dsa_indexer_skip_topk_offset: int = 0
    dsa_indexer_loss_coeff: float = 0.0
    dsa_indexer_use_sparse_loss: bool = False
    dsa_kernel_backend: str = "none"
    linear_attention_freq: _FREQUENCY | None = None
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32

    def letter(self, number: int) -> str:
        """Return the kind of layer ``number``, counted from 1, as --hybrid-layer-pattern writes it.

        * is multi-head attention, + multi-latent, D sparse attention, G a gated delta net.
        """
        variant = self.experimental_attention_variant
        if variant == "gated_delta_net" and _applies(self.linear_attention_freq or 1, number):
            return "G"
        if variant == "dsa":
            return "D"
        return "+" if self.multi_latent_attention else "*"

    def window(self, number: int, length: int) -> int:
        """Return how many of ``length`` tokens one sees in layer ``number`` at most, itself among them."""
        has_one = self.window_attn_skip_freq is None or _applies(self.window_attn_skip_freq, number)
        return min(length, seen(self.window_size) or length) if has_one else length

    def chooses(self, number: int) -> bool:
        """Whether sparse attention in layer ``number`` has an indexer, which serves layers after it too."""
        after = max(0, number - max(1, self.dsa_indexer_skip_topk_offset))
        return after % self.dsa_indexer_topk_freq == 0

    @property
    def compresses_at_once(self) -> bool:
        """Whether one product compresses queries, keys and values."""
        return self.mla_down_proj_fusion and self.q_lora_rank > 0

    @property
    def norms_hidden(self) -> bool:
        """Whether the norm of queries is one of the hidden state, since they are not compressed."""
        return self.multi_latent_attention and self.qk_layernorm and not self.q_lora_rank

    @property
    def query_width(self) -> int:
        """The width of a query in multi-latent attention."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim


def seen(window: object) -> int | None:
    """Return the number of tokens in ``window``, such as 127,0: a token and those before it; None for all."""
    before = str(window).strip("()").partition(",")[0]
    return int(before) + 1 if before.isdigit() else None


def sees_later(window: object) -> bool:
    """Whether a token sees any after itself in ``window``, such as 127,0; a -1 stands for all."""
    return str(window).strip("()").partition(",")[2].strip() not in ("", "0")


def _applies(frequency: _FREQUENCY, number: int) -> bool:
    """Whether ``frequency`` has a 1 for layer ``number``; as a number k it has a 0 for each k-th one."""
    if isinstance(frequency, tuple):
        return bool(frequency[number - 1])
    return number % frequency != 0
