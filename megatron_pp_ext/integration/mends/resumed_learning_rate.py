"""The learning rate of a resumed run, whose flags differ from those that its checkpoint was trained with."""

import functools
from collections.abc import Callable
from typing import Any


def name_the_flag(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Let the refusal of another --train-iters, --lr-decay-iters and the like name the flag that allows it.

    Seam: ``OptimizerParamScheduler._check_and_set`` in ``megatron.core.optimizer_param_scheduler``.
    """

    @functools.wraps(stock)
    def check_and_set(self: Any, cls_value: Any, sd_value: Any, name: str) -> Any:
        try:
            return stock(self, cls_value, sd_value, name)
        except AssertionError as error:
            raise SystemExit(
                f"megatron_pp_ext: the checkpoint has {sd_value} as {name}, this run has {cls_value} "
                "(iterations are counted in samples); to go by this run's flags add "
                "--override-opt_param-scheduler, to go by the checkpoint "
                "--use-checkpoint-opt_param-scheduler"
            ) from error

    return check_and_set
