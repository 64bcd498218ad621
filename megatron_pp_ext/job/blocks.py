"""The layers of a model that a JSON describes one by one, as --heterogeneous-layers-config-path names it.

It has ``block_configs``, each with ``attention`` and ``ffn`` or ``mlp``, in the words of Llama-Nemotron's
config.json (``HeterogeneousTransformerConfig`` in megatron.core.transformer.heterogeneous;
arXiv 2411.19146).
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from megatron_pp_ext.json_input import naming, parse, read

_FIX = "give the config.json of a model whose block_configs describe each layer"


class Half(NamedTuple):
    """A layer's attention or MLP: absent, a single product in its place, or the full one.

    ``size`` is the number of query groups, or the width of the MLP; 0 for the model's own.
    """

    is_left_out: bool = False
    is_linear: bool = False
    size: int = 0


class LayerBlock(NamedTuple):
    """One layer."""

    attention: Half
    mlp: Half


@lru_cache(maxsize=64)
def blocks(path: str | None, text: str | None, heads: int, hidden: int) -> tuple[LayerBlock, ...]:
    """Return the layers that ``text`` describes, or the file at ``path``, of a model of these sizes.

    ValueError for a file that cannot be read, and for content that describes no layers.
    """
    source = "--heterogeneous-layers-config-encoded-json" if text else f"{path}"
    with naming(source):
        try:
            content = parse(text, _FIX) if text else read(Path(path or ""), _FIX)
        except OSError as error:
            raise ValueError(f"cannot be read ({error.strerror}): {_FIX}") from None
        layers = content.get("block_configs") if isinstance(content, dict) else None
        if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
            raise ValueError(f"has no list of block_configs: {_FIX}")
        return tuple(
            LayerBlock(
                _half(layer.get("attention"), "num_query_groups", "n_heads_in_group", lambda n: heads // n),
                _half(
                    layer.get("ffn") or layer.get("mlp"),
                    "ffn_hidden_size",
                    "ffn_mult",
                    # Two thirds of it times the hidden size, in multiples of 256.
                    lambda multiple: -(-int(2 * multiple * hidden / 3) // 256) * 256,
                ),
            )
            for layer in layers
        )


def _half(entry: Any, name: str, other: str, derived: Callable[[Any], int]) -> Half:
    """Return the half that ``entry`` describes, whose size is ``name`` or ``derived`` from ``other``."""
    if not isinstance(entry, Mapping) or (name not in entry and other not in entry):
        raise ValueError(f"a layer has no {name} and no {other}: {_FIX}")
    size, from_other = entry.get(name), entry.get(other)
    if size is None and from_other is not None:
        size = derived(from_other)
    return Half(bool(entry.get("no_op")), bool(entry.get("replace_with_linear")), int(size or 0))
