"""Checkpoints of a distributed optimizer whose gradients are in several buckets.

Megatron pads the end of each bucket to a multiple of 128 and of the number of replicas.  To save a
distributed optimizer fully reshardable it gathers the state without this padding, and then takes each
parameter from where it begins with padding.  So the state of every parameter after a padded bucket is
another's, and the end of the last one is zeros.  The checkpoint loads without a word and trains on with other
weights.  Tied embeddings are a bucket of their own, so that it takes no flag to have several.

Megatron-LM has corrected this in its development version of 21 August 2026 (pull request 5077).
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from megatron_pp_ext.integration.patching import substitute
from megatron_pp_ext.integration.workarounds.workaround import Workaround

WORKAROUND = Workaround(
    "--dist-ckpt-optim-fully-reshardable where gradients are in several buckets",
    "0.17 to 0.19",
    "tests/integration/test_crossing.py::test_goes_on_where_it_was",
)


@substitute(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_param_state_fully_reshardable",
    "self model_sharded_state_dict is_loading metadata",
    WORKAROUND.defect,
)
def count_without_padding(stock: FunctionType) -> Callable[..., Any]:
    """Let a parameter's place be counted as its state is gathered, without the padding of earlier buckets."""
    if "buckets" in stock.__code__.co_names:
        return stock  # The corrected function looks at the padding of each bucket, the other at no bucket.

    @functools.wraps(stock)
    def sharded_param_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _places_without_padding(self.buffers):
            return stock(self, *args, **kwargs)

    return sharded_param_state


@contextmanager
def _places_without_padding(buffers: Iterable[Any]) -> Iterator[None]:
    """Let each buffer's map of parameters to [start, end), in elements, leave out the padding of buckets."""
    padded = [(buffer, buffer.param_index_map) for buffer in buffers]
    try:
        for buffer, places in padded:
            padding = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
            before = [0, *itertools.accumulate(padding)]
            buffer.param_index_map = {
                parameter: (start - before[bucket], end - before[bucket], bucket)
                for parameter, (start, end, bucket) in places.items()
            }
        yield
    finally:
        for buffer, places in padded:
            buffer.param_index_map = places
