"""The token exchanges that are hidden where a forward and a backward of a layer run together."""

from megatron_pp_ext.costs.part import Part


def overlapped(attention: Part, mlp: Part, processors: float = 1.0) -> float:
    """Return the seconds that a pair of a forward and a backward of one layer hides.

    Megatron runs an exchange of tokens with each of four computations: the attention of the forward, the
    experts of either half, and the attention of the backward (``TransformerLayerSchedulePlan.run`` in
    megatron.core.models.common.model_chunk_schedule_plan).  An exchange longer than its computation is
    not hidden whole, and a computation slows down while an exchange leaves it ``processors``, a part of all.
    """
    exchange = mlp.exchanged_seconds
    computations = (
        attention.forward_seconds,
        mlp.forward_seconds - 2 * exchange,
        mlp.backward_seconds - 2 * exchange,
        attention.backward_seconds,
    )
    return sum(min(processors * exchange, max(0.0, seconds)) for seconds in computations)
