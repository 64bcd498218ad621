"""A model and how to train it, in the names of Megatron's arguments; its parameters and its operations."""

from argparse import Action, Namespace
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from megatron_pp_ext.costs.model_parts import model_parts
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.job import flag_effects, flag_table
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.job.typed_job import PLACES, Job, with_derived
from megatron_pp_ext.json_input import did_you_mean, is_number

_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")

_FROM_ZERO = {
    "moe_router_group_topk",
    "moe_router_num_groups",
    "mtp_num_layers",
    "no_rope_freq",
    "num_experts",
    "recompute_num_layers",
}
"""Arguments for which 0 means none, as Megatron takes them, and not sizes of 1 or more."""


_MORE_CHOICES = {"main_params_dtype"}
"""Arguments for which the costs know more values than Megatron's parser accepts."""


@cache
def arguments() -> Mapping[str, Action]:
    """Return the arguments of a model and its training, this package's included, by their names."""
    names = {*flag_effects.described(), *flag_table.names()}
    return {action.dest: action for action in flag_table.parser()._actions if action.dest in names}


def require_known(values: Mapping[str, Any], source: str) -> None:
    """Raise ValueError, naming ``source``, for a name that a description has no place for."""
    accepted = arguments()
    for name in values:
        if name not in accepted:
            hint = did_you_mean(name, accepted, "leave it out", cutoff=0.6)
            raise ValueError(f"{source}: {name!r} is unknown: {hint}")


def describe(values: Mapping[str, Any], source: str = "the model") -> Job:
    """Return the job of ``values``, by name; ValueError, naming ``source``, for unknown names and values.

    They are an object such as ``{"num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96,
    "seq_length": 2048, "vocab_size": 51200, "bf16": true}``.
    """
    require_known(values, source)
    args, _ = flag_table.parse([], values)
    derive_arguments(args)
    require_complete(args, source)
    return Job.of(args)


def asked_of(job: Job) -> RequestedJob:
    """Return the request of a ``job`` that no flags describe: its fields, and no other argument."""
    values = {name: job.value(name) for name in PLACES}
    return RequestedJob.of_args(flag_table.parse([], values)[0])


def derive_arguments(args: Namespace) -> None:
    """Set the arguments that Megatron derives from others, and this package's name of the schedule."""
    vars(args).update(with_derived(vars(args)))


def require_complete(args: Namespace, source: str) -> None:
    """Raise ValueError for a size that is missing and for a value that Megatron does not accept."""
    for name in _NEEDED:
        if getattr(args, name) is None and (name != "num_layers" or not args.hybrid_layer_pattern):
            raise ValueError(f"{source} has no {flag(name)}: give it")
    for name, action in arguments().items():
        value = getattr(args, name)
        rule = _rule(action, value, args)
        if value not in (None, action.default) and rule:
            raise ValueError(f"{source} has {flag(name)} {value!r}, but it must be {rule}: correct it")
    if not args.kv_channels and args.hidden_size % args.num_attention_heads:
        raise ValueError(
            f"--hidden-size {args.hidden_size} is not divisible by --num-attention-heads "
            f"{args.num_attention_heads}: change one, or give --kv-channels"
        )
    if args.group_query_attention and args.num_attention_heads % args.num_query_groups:
        raise ValueError(
            f"--num-query-groups {args.num_query_groups} does not divide --num-attention-heads "
            f"{args.num_attention_heads}: change one of them"
        )
    if args.num_experts and args.moe_router_topk > args.num_experts:
        raise ValueError(
            f"--moe-router-topk {args.moe_router_topk} is more than --num-experts {args.num_experts}: "
            "lower it"
        )
    if args.bf16 and args.fp16:
        raise ValueError("--bf16 and --fp16 contradict each other: leave one out")


def _rule(action: Action, value: Any, args: Namespace) -> str:
    """Return the rule for ``value`` of ``action``, the flag of an argument; empty where it holds."""
    if action.dest == "pipeline_memory_limit":
        is_right = isinstance(value, str) or (is_number(value) and value > 0)
        rule = "a number above 0, or a text with one for each rank, as in 0.9-0.8"
    elif action.dest in (texts := flag_table.texts_or_numbers()):
        is_right, rule = isinstance(value, str) or is_number(value), texts[action.dest]
    elif action.type is flag_table.pattern:
        is_left_out = action.dest == "moe_layer_freq" and not args.num_experts
        is_right = is_left_out or _is_none(action, value, args) or _is_frequency(value, args.num_layers)
        rule = "a whole number of 1 or more, or a list of 0 and 1, one a layer"
    elif action.nargs == 0:
        is_right, rule = isinstance(value, bool), "true or false"
    elif action.nargs is not None:
        is_right, rule = isinstance(value, list), "a list"
    elif action.choices and action.dest not in _MORE_CHOICES:
        is_right, rule = value in action.choices, f"one of {', '.join(map(str, action.choices))}"
    elif action.type is int:
        has_own_rule = action.dest == "pipeline_update_interval"  # with an error of its own
        is_right = _is_size(value) or _is_none(action, value, args) or has_own_rule
        rule = "a whole number of 1 or more"
    elif action.type is float:
        is_right, rule = is_number(value), "a finite number"
    else:
        is_right, rule = isinstance(value, str) or action.type not in (None, str), "a text"
    return "" if is_right else rule


def _is_none(action: Action, value: object, args: Namespace) -> bool:
    """Whether ``value`` is a 0 that means none."""
    is_unread = action.dest == "num_query_groups" and not args.group_query_attention
    return value == 0 and not isinstance(value, bool) and (is_unread or action.dest in _FROM_ZERO)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_frequency(value: object, layers: int | None) -> bool:
    if isinstance(value, list):
        return len(value) == layers and all(mark in (0, 1) for mark in value)
    return _is_size(value)


def flag(name: str) -> str:
    """Return ``name`` as a flag."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of weights of the whole model, each counted once.

    ``active_parameters`` are the ones that a token is multiplied by or added to: of experts the chosen ones,
    and no embedding or learned positions, of which a token takes one row.  A tied weight is used as the
    output layer.
    """

    parameters: int
    active_parameters: int


def parameters(job: Job) -> Parameters:
    """Return the parameters of ``job``'s whole model, with MTP."""
    alone = job.changed(
        tensor_model_parallel_size=1,
        sequence_parallel=False,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=None,
        padded_vocab_size=job.padded_vocabulary,
    )
    model = model_parts(alone)
    total = sum(model.layers, model.last_norm + model.output)
    if depths := job.model.mtp_num_layers:
        prediction = model.prediction
        total += prediction.repeated(depths) if job.model.mtp_use_repeated_layer else prediction.times(depths)
    looked_up = model.positions + (model.table if job.model.untie_embeddings_and_output_weights else Part())
    routed_share = job.model.moe_router_topk / (job.model.num_experts or 1)
    return Parameters(
        parameters=round(total.parameters + total.expert_parameters + looked_up.parameters),
        active_parameters=round(total.parameters + routed_share * total.expert_parameters),
    )


def entries(job: Job) -> dict[str, int]:
    """Return the counts for a result by name: none for measured stages, whose layers may be unknown."""
    return {} if job.pipeline.pipeline_costs else asdict(parameters(job))


_OPERATIONS = 6
"""The operations of a multiply-add: two in the forward, and two for the gradient of each factor."""

_ATTENTIONS = "*+DG"


def model_operations(job: Job, samples: int) -> float:
    """Return the operations of a step with so many ``samples`` on all ranks together.

    Layers that a file describes one by one count as the model's others, as they do in Megatron.

    They are those of ``num_floating_point_operations`` of megatron.training.training, on which published MFUs
    rest: causal masks hide half of attention, windows and routers do not count, and nothing is recomputed.
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
