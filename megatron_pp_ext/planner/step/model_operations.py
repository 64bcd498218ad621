"""The model operations of a step, as Megatron counts them for the rate that it logs.

The same as ``num_floating_point_operations`` of megatron.training.training, on which published MFUs rest:
causal masks hide half of attention, windows and routers do not count, and nothing is recomputed.
"""

from collections.abc import Iterator

from megatron_pp_ext.job.typed_job import Job

_OPERATIONS = 6
"""The operations of a multiply-add: two in the forward, and two for the gradient of each factor."""

_ATTENTIONS = "*+DG"


def model_operations(job: Job, samples: int) -> float:
    """Return the operations of a step with so many ``samples`` on all ranks together.

    Layers that a file describes one by one count as the model's others, as they do in Megatron.
    """
    model = job.model
    tokens = samples * model.seq_length
    by_token, by_pair = _head(job), 0.0
    for letter in _letters(job):
        by_token += _products(job, letter)
        by_pair += _scores(job, letter)
    return _OPERATIONS * tokens * (by_token + model.seq_length * by_pair)


def _letters(job: Job) -> Iterator[str]:
    """Yield the parts of all layers, MTP's included, by the letters of --hybrid-layer-pattern."""
    model = job.model
    if model.pattern is not None:
        predicting = (model.predicting_pattern or "") * model.mtp_num_layers
        yield from model.pattern.replace("|", "") + predicting
        return
    experts = model.has_experts
    for number, has_experts in enumerate([*experts, *experts[-1:] * model.mtp_num_layers], 1):
        yield job.attention.letter(number)
        yield "E" if has_experts else "-"


def _head(job: Job) -> float:
    """Return the multiply-adds of a token in output layers, and in front of the layers that predict."""
    model, depths = job.model, job.model.mtp_num_layers
    joined = 0 if model.pattern else depths * (3 * model.hidden_size + 2 * model.hidden_size**2)
    return joined + (1 + depths) * model.hidden_size * job.padded_vocabulary


def _products(job: Job, letter: str) -> float:
    """Return the multiply-adds of a token with the weights of a part of a layer."""
    model = job.model
    hidden, products = model.hidden_size, 3 if model.swiglu else 2
    if letter == "-":
        return products * hidden * model.mlp_width
    if letter == "E":
        routed = products * model.expert_input * model.expert_width * model.moe_router_topk
        around = 2 * hidden * model.moe_latent_size
        return routed + around + products * hidden * model.moe_shared_expert_intermediate_size
    if letter == "M":
        inner, states = 2 * hidden, model.mamba_state_dim
        projected = 2 * inner + 2 * model.mamba_num_groups * states + model.mamba_heads
        return hidden * projected + 3.5 * inner * states + inner * hidden
    return _projections(job, letter) if letter in _ATTENTIONS else 0.0


def _projections(job: Job, letter: str) -> float:
    """Return the multiply-adds of a token with the weights of attention."""
    model, attention = job.model, job.attention
    hidden, heads = model.hidden_size, model.num_attention_heads
    if letter == "G":
        keys = attention.linear_key_head_dim * attention.linear_num_key_heads
        values = attention.linear_value_head_dim * attention.linear_num_value_heads
        convolved = attention.linear_conv_kernel_dim * (2 * keys + values)
        rule = 4 * values * attention.linear_value_head_dim
        return hidden * (2 * keys + 3 * values + 2 * attention.linear_num_value_heads) + convolved + rule
    if letter in "+D":
        width = heads * (attention.qk_head_dim + attention.qk_pos_emb_head_dim)
        queries = attention.q_lora_rank * (hidden + width + 1) if attention.q_lora_rank else hidden * width
        expanded = attention.kv_lora_rank * (
            hidden + heads * (attention.qk_head_dim + attention.v_head_dim) + 1
        )
        return queries + expanded + hidden * (attention.qk_pos_emb_head_dim + heads * attention.v_head_dim)
    query, keys = model.head_width * heads, model.head_width * model.key_heads
    gate = query if attention.attention_output_gate and not model.pattern else 0
    return hidden * (2 * query + 2 * keys + gate)


def _scores(job: Job, letter: str) -> float:
    """Return the multiply-adds of a pair of tokens, of which a causal mask leaves half."""
    model, attention = job.model, job.attention
    if letter in "+D":
        width = attention.qk_head_dim + attention.qk_pos_emb_head_dim + attention.v_head_dim
        return model.num_attention_heads * width / 2
    return float(model.num_attention_heads * model.head_width) if letter == "*" else 0.0
