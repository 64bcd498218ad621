"""Operands of a weight gradient that wait for W, and the bytes that they hold meanwhile."""

import torch

from megatron_pp_ext.megatron.core.engine_linear import DeferringStore
from megatron_pp_ext.runtime.activation_meter import ActivationMeter
from megatron_pp_ext.runtime.split import STORE, Owner

ROWS, WIDTH = 8, 4
SLOT = Owner(0, 0)


class Layer(torch.nn.Module):
    fuse_wgrad_accumulation = True

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH))


def put(*operands):
    """Hand ``operands`` over; returns how many bytes wait, and the operands of the product."""
    received = []

    def product(*arguments):
        received.extend(arguments)
        return None, None

    STORE.meter = ActivationMeter([])
    try:
        with STORE.collecting(SLOT):
            DeferringStore(Layer()).put(operands, product)
        waiting = STORE.meter.live_bytes
        STORE.run(SLOT)
    finally:
        STORE.meter = None
    return waiting, received
