"""Hugging Face weights that Megatron-Bridge imports under a V and exports again are the file's, by name.

Llama's map has names for Megatron's own layers, which stand in for Transformer Engine's here.
"""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import megatron_pp_ext
from tests.support import frameworks, ranks

frameworks.require("megatron.bridge")

from megatron.bridge import AutoBridge  # noqa: E402

from tests.frameworks.llama import LLAMA  # noqa: E402
from tests.frameworks.megatron_bridge import FOR_A_CPU, layers_of  # noqa: E402


def _round_trip(
    rank: int, folder: Path
) -> tuple[list[list[int]], dict[str, torch.Tensor], list[torch.Tensor]]:
    """Return the layers on this rank, what all ranks export together, and the output weight if it is here."""
    megatron_pp_ext.install("v-half", ranks=2, microbatches=8)
    bridge = AutoBridge.from_hf_pretrained(folder)
    provider = bridge.to_megatron_provider()
    for name, value in FOR_A_CPU.items():
        setattr(provider, name, value)
    provider.pipeline_model_parallel_size = 2
    provider.virtual_pipeline_model_parallel_size = 2
    provider.transformer_layer_spec = layers_of
    provider.finalize()
    torch.distributed.init_process_group("gloo")
    provider.initialize_model_parallel(seed=1)
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    exported = {name: tensor.clone() for name, tensor in bridge.export_hf_weights(model, cpu=True)}
    layers = [[layer.layer_number for layer in chunk.decoder.layers] for chunk in model]
    return (
        layers,
        exported,
        [chunk.output_layer.weight.detach().clone() for chunk in model if chunk.post_process],
    )


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_weights_come_and_go_by_name(is_tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    LLAMA.tie_word_embeddings = is_tied
    saved = LlamaForCausalLM(LLAMA)
    saved.save_pretrained(tmp_path)
    expected = saved.state_dict()
    first, last = ranks.run_ranks(_round_trip, 2, tmp_path)[::-1]  # a V has both ends on the last rank
    assert (first[0], last[0]) == ([[1, 2], [7, 8]], [[3, 4], [5, 6]])
    for _, exported, _ in (first, last):
        assert exported.keys() | {"lm_head.weight"} == expected.keys()
        assert not [name for name in exported if not torch.equal(exported[name], expected[name])]
    assert torch.equal(first[2][0], expected["lm_head.weight"])
    assert last[2] == []
