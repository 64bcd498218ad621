"""The random state of "the current CUDA device" is the CPU generator's.

Tensors are on the CPU, so dropout and initialization draw from the CPU generator whatever Megatron saves,
seeds and restores. Letting torch.cuda's calls reach that generator keeps Megatron's tracker of per-rank
states working. The price: the two generators that a GPU machine has are one here. Whatever draws from the
CPU's would move dropout masks, so each data loader draws the seeds of its workers from a generator of its
own; a run resumed with dropout then has the masks of one that never stopped.
"""

import logging
from functools import wraps
from typing import Any

import torch
from torch.utils.data import DataLoader


def _get_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _seed_all(seed: int) -> None:
    """Do nothing: torch.manual_seed calls this after it has seeded the CPU generator."""


def _give_data_loaders_generators() -> None:
    """Give each new DataLoader that has no generator one with the CPU generator's seed."""
    original = DataLoader.__init__

    @wraps(original)
    def init(self: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(torch.initial_seed())

    DataLoader.__init__ = init  # type: ignore[method-assign]


def install() -> None:
    """Point torch.cuda's random functions at the CPU generator, and let data loaders leave it alone."""
    _give_data_loaders_generators()
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = _get_state  # type: ignore[attr-defined]
        module.set_rng_state = _set_state  # type: ignore[attr-defined]
        module.manual_seed = _seed  # type: ignore[attr-defined]
        module.manual_seed_all = _seed_all  # type: ignore[attr-defined]
    torch.cuda.default_generators = (torch.default_generator,)
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_not_about_the_shared_generator)


def _not_about_the_shared_generator(record: logging.LogRecord) -> bool:
    """Drop the tracker's warning, one a dropout, that the CPU state moved while it held the GPU's."""
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()
