"""The attention of each layer of a model: its kind and its window."""

from collections.abc import Callable, Mapping

from megatron_pp_ext.costs import gated_delta_net, latent_attention, self_attention, sparse_attention
from megatron_pp_ext.costs.layer_costs import LayerCosts
from megatron_pp_ext.costs.part import Part

KINDS: Mapping[str, Callable[..., Part]] = {
    "*": self_attention.attention,
    "+": latent_attention.attention,
    "D": sparse_attention.attention,
    "G": gated_delta_net.attention,
}
"""The kinds of attention by their letters in --hybrid-layer-pattern."""


class Attentions:
    """The attention of the layers of a model; equal ones are one object."""

    def __init__(self, costs: LayerCosts) -> None:
        self._costs = costs
        self._made: dict[tuple[str | int, ...], Part] = {}

    def layer(self, number: int, letter: str | None = None) -> Part:
        """Return the attention of layer ``number``, counted from 1.

        Its kind is ``letter``, or the model's for this layer.
        """
        attention = self._costs.job.attention
        kind = letter or attention.letter(number)
        if kind == "G":
            return self._once(kind)
        if kind == "D":
            return self._once(kind, attention.chooses(number))
        return self._once(kind, attention.window(number, self._costs.job.model.seq_length))

    def _once(self, kind: str, *how: int) -> Part:
        if (kind, *how) not in self._made:
            self._made[kind, *how] = KINDS[kind](self._costs, *how)
        return self._made[kind, *how]
