"""Let torch's norms run under sequence parallelism.

With --sequence-parallel a norm gets a part of the sequence on each tensor-parallel rank, so the gradients of
its weight and bias have to be summed over these ranks. Megatron does so for the parameters that have the
attribute ``sequence_parallel``, which the norms of Apex and Transformer Engine set. The norms of torch, which
Megatron takes where neither is installed, do not set it, and Megatron refuses to make them.
"""

import copy
from collections.abc import Callable
from typing import Any

from megatron_pp_ext.around import around


@around
def mark_for_sequence_parallelism(
    make: Callable[..., Any], cls: type, config: Any, *args: Any, **kwargs: Any
) -> Any:
    """Make the norm of a model that is not sequence-parallel, and mark its parameters."""
    if not config.sequence_parallel:
        return make(cls, config, *args, **kwargs)
    plain = copy.copy(config)
    plain.sequence_parallel = False
    norm = make(cls, plain, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = True
    return norm
