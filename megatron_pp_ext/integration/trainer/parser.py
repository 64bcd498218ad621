"""The hook that adds this package's flags to Megatron's parser."""

import functools
from argparse import ArgumentParser
from collections.abc import Callable
from typing import NoReturn

from megatron_pp_ext.integration.patching import hook
from megatron_pp_ext.integration.trainer.agreement import refused
from megatron_pp_ext.job import flag_table, our_flags


@hook("megatron.training.arguments:add_megatron_arguments", "parser", "the --pipeline-schedule flags")
def add_flags(stock: Callable[..., ArgumentParser], parser: ArgumentParser) -> ArgumentParser:
    """Add this package's flags to Megatron's."""
    parser = our_flags.add_flags(stock(parser))
    if type(parser) is ArgumentParser:
        # By default an error comes with the names of all of Megatron's flags, hundreds of lines.
        vars(parser)["error"] = functools.partial(_refuse, parser)
    return parser


def _refuse(parser: ArgumentParser, message: str) -> NoReturn:
    """End the process with argparse's ``message`` in one line, and the flag that may be meant."""
    unknown = next((word for word in message.split() if word.startswith("--")), "")
    flag = unknown.partition("=")[0].rstrip(":")
    option = [option for option in parser._option_string_actions if option.startswith("--")]
    fix = "correct it (--help shows all flags)"
    raise refused(f"{message}; {flag_table.hint(flag, option, fix) if flag and flag not in option else fix}")
