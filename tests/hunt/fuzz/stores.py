"""Loss functions whose reports Megatron takes and a message of tensors cannot carry."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_pp_ext import pretrain_gpt
from tests.support import training


class Report(dict[str, torch.Tensor]):
    """Losses with something beside them that Megatron does not log: ``lengths``."""


def _unnamed(report: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return defaultdict(lambda: None, report)


def _jagged(report: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    odd = Report(report)
    odd.lengths = torch.nested.nested_tensor([*report.values()] * 2, layout=torch.jagged)
    return odd


_STORES = {"unnamed-factory": _unnamed, "jagged": _jagged}


def options(row: Mapping[str, str]) -> dict[str, Callable[..., None]]:
    """What ``training.train`` needs for the loss store of ``row``."""
    if row["store"] == "plain":
        return {}

    def initialize(chunks: list[torch.nn.Module]) -> None:
        training.initialize_by_layer(chunks)
        loss_func = pretrain_gpt.loss_func

        def odd_loss_func(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            *values, report = loss_func(*args, **kwargs)
            return *values, _STORES[row["store"]](report)

        pretrain_gpt.loss_func = odd_loss_func

    return {"initialize": initialize}
