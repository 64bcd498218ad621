"""What a line of flags means, read as a job reads it but without one."""

from argparse import Namespace

import pytest

from tests.support import ranks  # noqa: F401  (the stand-ins for torch.cuda, before Megatron is imported)

# isort: split
from megatron.training import arguments as megatron_arguments

from megatron_pp_ext import cpu
from megatron_pp_ext.integration.request.model_costs import estimate
from megatron_pp_ext.integration.request.validation import read_flags
from megatron_pp_ext.schedule.costs import Costs
from tests.support.training import TINY

PP4 = "--pipeline-model-parallel-size 4"


def arguments(flags: str) -> Namespace:
    """Return Megatron's arguments of the tiny GPT with ``flags``, parsed and not yet validated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train.py", *cpu.with_cpu_flags([*TINY, *flags.split()])])
        args: Namespace = megatron_arguments.parse_args()
    return args


def read(monkeypatch: pytest.MonkeyPatch, flags: str):
    """Return the pipeline that ``flags`` request on four ranks; None where they request none."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    return read_flags(arguments(flags))


def assert_refused(monkeypatch: pytest.MonkeyPatch, flags: str, message: str) -> None:
    """``flags`` are refused by an error of one line that matches ``message``."""
    with pytest.raises(ValueError, match=message) as error:
        read(monkeypatch, flags)
    assert "\n" not in str(error.value)


def estimated_costs(flags: str, stages: int) -> Costs:
    """Return the costs that are estimated for the tiny GPT with ``flags``, cut into ``stages``."""
    return estimate(arguments(flags), stages)
