"""A model and how to train it, in the names that Megatron gives its arguments.

Such as the JSON object ``{"num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96, "seq_length":
2048, "vocab_size": 51200, "bf16": true}``, of which ``describe`` makes a job.
"""

from argparse import Action, Namespace
from collections.abc import Mapping
from functools import cache
from typing import Any

from megatron_pp_ext.job import flag_effects, flag_table, our_flags
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
    names = {*flag_effects.described(), *our_flags.names()}
    return {action.dest: action for action in flag_table.parser()._actions if action.dest in names}


def require_known(values: Mapping[str, Any], source: str) -> None:
    """Raise ValueError, naming ``source``, for a name that a description has no place for."""
    accepted = arguments()
    for name in values:
        if name not in accepted:
            hint = did_you_mean(name, accepted, "leave it out", cutoff=0.6)
            raise ValueError(f"{source}: {name!r} is unknown: {hint}")


def describe(values: Mapping[str, Any], source: str = "the model") -> Job:
    """Return the job of ``values``, by name; ValueError, naming ``source``, for unknown names and values."""
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
    elif action.dest in (texts := our_flags.texts_or_numbers()):
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
