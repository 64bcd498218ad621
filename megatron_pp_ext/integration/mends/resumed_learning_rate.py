"""The learning rate of a resumed run, whose flags differ from those that its checkpoint was trained with."""

from collections.abc import Callable
from typing import Any

from megatron_pp_ext.around import around
from megatron_pp_ext.integration.mends.mend import EVERY, Mend
from megatron_pp_ext.integration.releases import CORE_0_17


@around
def name_the_flag(stock: Callable[..., Any], self: Any, cls_value: Any, sd_value: Any, name: str) -> Any:
    """Let the refusal of another --train-iters, --lr-decay-iters and the like name the flag that allows it.

    Seam: ``OptimizerParamScheduler._check_and_set`` in ``megatron.core.optimizer_param_scheduler``.
    """
    try:
        return stock(self, cls_value, sd_value, name)
    except AssertionError as error:
        raise SystemExit(
            f"megatron_pp_ext: the checkpoint has {sd_value} as {name}, this run has {cls_value} "
            "(iterations are counted in samples); to go by this run's flags add "
            "--override-opt_param-scheduler, to go by the checkpoint "
            "--use-checkpoint-opt_param-scheduler"
        ) from error


MEND = Mend(
    "the flag that allows a resumed run another --train-iters",
    EVERY,
    "tests/integration/test_needed_flags.py::test_resuming_with_other_steps_names_the_flag",
    {
        "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler._check_and_set": (
            {CORE_0_17: "self cls_value sd_value name"},
            name_the_flag,
        )
    },
)
