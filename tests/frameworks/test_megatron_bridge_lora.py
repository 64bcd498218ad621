"""Adapters (LoRA) that Megatron-Bridge trains under our schedules are those of stock, to the last bit.

Weights come from a folder of Hugging Face, and a checkpoint has the adapters alone, in both formats.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from tests.support import frameworks

frameworks.require("megatron.bridge")

from tests.frameworks.llama import LLAMA  # noqa: E402
from tests.frameworks.megatron_bridge import Job, assert_same_bits, stock, under  # noqa: E402

MERGED = "model.layers.0.self_attn.o_proj.weight"
"""A weight into which an adapter is merged."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The place of a tiny Llama in Hugging Face's format, and of what stock makes of it in four steps."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LLAMA).save_pretrained(folder / "weights")
    return folder


def saved_adapters(checkpoint: Path) -> dict[str, torch.Tensor]:
    (file,) = checkpoint.rglob("adapter_model.safetensors")
    return load_file(file)


@pytest.mark.parametrize(("name", "chunks"), [("v-half", 2), ("zb-h1", 1)])
def test_adapters_train_resume_and_are_exported(name: str, chunks: int, folder: Path, tmp_path: Path) -> None:
    """Two steps, and two more from the checkpoint of the first, are four under stock."""
    job = Job(adapts=str(folder / "weights"), steps=4, save=str(folder / "stock"))
    theirs = stock(job)
    half, whole = tmp_path / "half", tmp_path / "whole"
    begun = under(name, replace(job, chunks=chunks, steps=2, save=str(half)))
    resumed = under(name, replace(job, chunks=chunks, load=str(half), save=str(whole)))
    assert_same_bits(
        replace(resumed, losses=begun.losses + resumed.losses, norms=begun.norms + resumed.norms), theirs
    )
    adapters, stocks = saved_adapters(whole), saved_adapters(folder / "stock")
    assert len(adapters) == 2 * 7 * LLAMA.num_hidden_layers
    assert any("lora_B" in name and weight.any() for name, weight in adapters.items())
    before = load_file(folder / "weights" / "model.safetensors")
    assert resumed.exported.keys() == before.keys()
    assert not torch.equal(resumed.exported[MERGED], before[MERGED])
    for ours, others in ((adapters, stocks), (resumed.exported, theirs.exported)):
        assert ours.keys() == others.keys()
        assert not [name for name in ours if not torch.equal(ours[name], others[name])]
