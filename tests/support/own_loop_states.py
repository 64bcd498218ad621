"""What ``tests/features/units/megatron/test_states.py`` compares, written to the file that it is given.

All of it runs in a process of its own, in which Megatron is as it comes.
"""

import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.ranks import run_ranks  # isort: skip  (the stand-ins come before Megatron)

from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm import mamba_mixer
from torch.nn import functional

import megatron_pp_ext
from tests.support import own_loop, own_loop_lengths
from tests.support.hybrid_layers import stack
from tests.support.own_loop_lengths import COUNTS, LENGTHS, SCHEDULES, TOKENS, PackedAttention

SIZES = {
    **{"mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_state_dim": 4, "mamba_num_groups": 2},
    **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"linear_num_key_heads": 1, "linear_num_value_heads": 2, "activation_func": functional.silu},
    **{"normalization": "RMSNorm", "add_bias_linear": False},
}


def hybrid(config: Any, **arguments: Any) -> HybridModel:
    """A model of Mamba-2, gated delta nets, attention that knows packs, and MLPs."""
    attention = stack.submodules.attention_layer.submodules
    core = replace(attention.self_attention.submodules, core_attention=PackedAttention)
    parts = replace(attention, self_attention=replace(attention.self_attention, submodules=core))
    layer = replace(stack.submodules.attention_layer, submodules=parts)
    layers = replace(stack, submodules=replace(stack.submodules, attention_layer=layer))
    stages = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    pattern = "MG*-|MG*-" if stages == 2 else "MG|*-|MG|*-"
    return HybridModel(
        config, layers, hybrid_layer_pattern=pattern, position_embedding_type="rope", **arguments
    )


def packed_step(iterator: Iterator[Any], model: Any) -> Any:
    """The forward step of packed documents; Megatron numbers the document of each token for Mamba-2."""
    return own_loop_lengths.packed_step(iterator, _Numbered(model))


class _Numbered:
    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, packed_seq_params: PackedSeqParams, **batch: Any) -> Any:
        params = replace(packed_seq_params, total_tokens=batch["input_ids"].shape[1])
        return self._model(**batch, packed_seq_params=params)


def trained(chunks: int, **about: Any) -> own_loop.Record:
    """Return the results of a model's training."""
    more = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    model = own_loop.build(chunks, model_class=hybrid, **more, **SIZES)
    return own_loop.train(model, COUNTS, LENGTHS, seq_length=1, **about)


def packed(chunks: int) -> own_loop.Record:
    """Return the results of packed documents."""
    own_loop.batches = own_loop_lengths.packed_batches
    try:
        return trained(chunks, forward_step_func=packed_step)
    finally:
        own_loop.batches = own_loop_lengths.BATCHES


def on_rank(rank: int) -> dict[str, Any]:
    """Return this rank's results."""
    own_loop.start()
    mamba_mixer._check_mamba_sequence_packing_support = lambda **unused: (True, None)
    results = {"stock": trained(1), "stock packed": packed(1)}
    for name, about in SCHEDULES.items():
        for kind, train in (("", trained), (" packed", packed)):
            with megatron_pp_ext.installed(
                name, ranks=2, microbatches=COUNTS[0], slice_tokens=TOKENS, **about
            ) as line:
                results[name + kind] = train(line.chunks)
    return results


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(pickle.dumps(run_ranks(on_rank, 2)))
