"""The flags of a launch script, read by Megatron's own parser without a process group, device or patch."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import NoReturn

from megatron.training.arguments import add_megatron_arguments

from megatron_pp_ext.integration.request.model_costs import vocabulary
from megatron_pp_ext.integration.request.parser import add_flags
from megatron_pp_ext.planner.step.model_description import flag, require_complete, settle

_LEAVE_OUT = "leave it out of the estimate"
_NOT_COUNTED = (
    ("multi_latent_attention", "its compressed keys are not modelled", _LEAVE_OUT),
    ("yaml_cfg", "the planner reads flags alone", "give the model's sizes as flags"),
    ("use_megatron_fsdp", "it shards weights in a way that is not modelled", _LEAVE_OUT),
)
"""Arguments with the rule that refuses them, and the fix."""


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise the error in one line, where argparse would end the process."""
        raise ValueError(f"in the model's flags: {message}: correct it")


def read_flags(words: Sequence[str]) -> Namespace:
    """The flags ``words`` with Megatron's defaults for the rest and the size of the vocabulary.

    ValueError for flags that Megatron does not know or that contradict each other, and for models whose
    costs are not modelled.
    """
    parser = add_megatron_arguments(_Parser(allow_abbrev=False, add_help=False))
    if not any("--pipeline-schedule" in action.option_strings for action in parser._actions):
        # Where this package's schedules are installed, Megatron's parser has their flags already.
        parser = add_flags(lambda parser: parser)(parser)
    args = parser.parse_args(list(words))
    for name, rule, fix in _NOT_COUNTED:
        if value := getattr(args, name, None):
            given = flag(name) if value is True else f"{flag(name)} {value}"
            raise ValueError(f"{given}: {rule}; {fix}")
    settle(args)
    args.num_layers = args.num_layers or getattr(args, "encoder_num_layers", None)
    args.seq_length = args.seq_length or getattr(args, "encoder_seq_length", None)
    require_complete(args, "the model")
    args.vocab_size = vocabulary(args)
    return args
