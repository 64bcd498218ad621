"""Megatron-Bridge's step for models of images trains under a V as under stock, to the last bit.

It takes a batch's labels for the rank that counts as the pipeline's last, and its images for the first.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support import frameworks, ranks

frameworks.require("megatron.bridge")

import megatron.bridge.training.vlm_step as vlm_step  # noqa: E402
from megatron.bridge.models.qwen_vl.qwen25_vl_provider import Qwen25VLModelProvider  # noqa: E402
from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig  # noqa: E402

import megatron_pp_ext  # noqa: E402
from tests.frameworks.megatron_bridge import TRANSFORMER, layers_of  # noqa: E402
from tests.support import own_loop  # noqa: E402
from tests.support.training import normal  # noqa: E402

WORDS, IMAGE, BEGINS_IMAGE, LENGTH = 64, 60, 61, 32


def _batches() -> Iterator[dict[str, Any]]:
    """Yield texts with an image of four patches each."""
    draw = torch.Generator().manual_seed(5)
    while True:
        tokens = torch.randint(0, 50, (1, LENGTH + 1), generator=draw)
        tokens[0, 2], tokens[0, 3:7] = BEGINS_IMAGE, IMAGE
        pixels = torch.randn(1, 16, 48, generator=draw)
        yield {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "loss_mask": torch.ones(1, LENGTH),
            "position_ids": torch.arange(LENGTH)[None],
            "attention_mask": torch.triu(torch.ones(1, 1, LENGTH, LENGTH), 1).bool(),
            "visual_inputs": GenericVisualInputs(
                pixel_values=pixels, image_grid_thw=torch.tensor([[[1, 4, 4]]])
            ),
        }


def _provider(chunks: int) -> Qwen25VLModelProvider:
    vision = Qwen2_5_VLVisionConfig(
        depth=2,
        hidden_size=32,
        intermediate_size=32,
        num_heads=2,
        patch_size=4,
        temporal_patch_size=1,
        window_size=8,
        out_hidden_size=32,
        fullatt_block_indexes=[1],
    )
    vision._attn_implementation = "eager"
    return Qwen25VLModelProvider(
        **TRANSFORMER,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        seq_length=LENGTH,
        vocab_size=WORDS,
        make_vocab_size_divisible_by=1,
        share_embeddings_and_output_weights=False,
        transformer_layer_spec=layers_of,
        vision_config=vision,
        mrope_section=[1, 1, 2],
        image_token_id=IMAGE,
        vision_start_token_id=BEGINS_IMAGE,
        video_token_id=62,
        vision_token_id=63,
        vision_end_token_id=59,
    )


def _name(chunk: Any, name: str) -> str:
    """Return the name of a weight with the number of its layer in the model."""
    words = name.split(".")
    if name.startswith("language_model.decoder.layers."):
        words[3] = str(chunk.language_model.decoder.layers[int(words[3])].layer_number)
    return ".".join(words)


def _step(rank: int, name: str | None, about: dict[str, str]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of a step's microbatches and this rank's gradients, where some are."""
    chunks = 1 if name in (None, "zb-h1") else 2
    if name is not None:
        megatron_pp_ext.install(name, ranks=2, microbatches=5, **about)
    provider = _provider(chunks)
    provider.finalize()
    torch.distributed.init_process_group("gloo")
    provider.initialize_model_parallel(seed=1)
    model = provider.provide_distributed_model(ddp_config=DistributedDataParallelConfig())
    weights = {_name(part.module, key): one for part in model for key, one in part.module.named_parameters()}
    with torch.no_grad():
        for key, weight in weights.items():
            is_scale = "norm" in key and key.endswith("weight")
            weight.copy_(0.05 * normal(key, weight.shape) + is_scale)
    state = mock.MagicMock()
    state.straggler_timer = lambda **unused: nullcontext()
    state.straggler_timer = mock.MagicMock()
    state.cfg.dataset = SimpleNamespace(skip_getting_attention_mask_from_dataset=False)
    state.cfg.rerun_state_machine = SimpleNamespace(check_for_nan_in_loss=False, check_for_spiky_loss=False)
    vlm_step.accumulate_flops_metadata = lambda *args, **kwargs: None
    for part in model:
        part.zero_grad_buffer()
    found = own_loop.run_step(
        model,
        [_batches() for _ in model],
        5,
        forward_step_func=partial(vlm_step.forward_step, state),
        seq_length=LENGTH,
    )
    gradients = {key: weight.main_grad.clone() for key, weight in weights.items()}
    return [float(one["lm loss"][0]) for one in found], gradients


@pytest.mark.parametrize(("name", "about"), [("v-half", {}), ("v-zb", {"loss_rank": "first"}), ("zb-h1", {})])
def test_same_bits_as_stock(name: str, about: dict[str, str]) -> None:
    ours, theirs = (ranks.run_ranks(_step, 2, *under) for under in ((name, about), (None, {})))
    assert [losses for losses, _ in ours] == [losses for losses, _ in theirs]
    assert len(theirs[1][0]) == 5
    ours_all, theirs_all = (
        {key: one for _, found in runs for key, one in found.items()} for runs in (ours, theirs)
    )
    assert ours_all.keys() == theirs_all.keys()
    assert any(key.startswith("visual.") and one.any() for key, one in theirs_all.items())
    assert not [key for key, one in theirs_all.items() if not torch.equal(one, ours_all[key])]
