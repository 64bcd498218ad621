"""What ``tests/features/units/megatron/test_mtp.py`` compares, written to the file that it is given.

All of it runs in a process of its own, in which Megatron is as it comes.
"""

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.ranks import run_ranks  # isort: skip  (the stand-ins come before Megatron)

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

import megatron_pp_ext
from tests.support import own_loop
from tests.support.own_loop_lengths import LENGTHS, PackedAttention

COUNTS = (6, 4)
PACKS = ((3, 19, 1, 2), (12,), (5, 1, 5), (2, 9, 17))
VARIES = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ALONE = (["embedding", *4 * ["decoder"]], 4 * ["decoder"], ["mtp", "mtp"], ["loss"])

LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale_all_dim": 1.0,
}
"""Keys of 12 numbers, 4 of them with a position, and values of 8."""

KINDS: dict[str, dict[str, Any]] = {
    "equal": {"depths": 1},
    "equal, two": {"depths": 2, "calculate_per_token_loss": True},
    "repeated": {"depths": 2, "packed": True, "mtp_use_repeated_layer": True, **VARIES},
    "without labels": {"depths": 2, "labels": False},
    "unlike": {"depths": 2, **VARIES},
    "packs": {"depths": 2, "packed": True, **VARIES},
    "packs by tokens": {"depths": 1, "packed": True, "calculate_per_token_loss": True, **VARIES},
    "latent": {"depths": 1, **LATENT},
    "latent packs": {"depths": 1, "packed": True, "rope_type": "rope", **LATENT, **VARIES},
    "latent packs, fused": {"depths": 1, "packed": True, "apply_rope_fusion": True, **LATENT, **VARIES},
}
"""The models and data that are trained, whole and in slices."""

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "v-half": {},
    "flex": {"memory_limit": 1.0},
}


class LatentAttention(PackedAttention):
    """The same with values that are narrower than keys, for packs with zeros after them."""

    def __init__(self, *about: Any, k_channels: int = 0, v_channels: int = 0, **more: Any) -> None:
        super().__init__(*about, **more)

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, **about: Any) -> Any:
        """See ``DotProductAttention``, whose output has the width of values."""
        self.hidden_size_per_partition = value.shape[-2] * value.shape[-1]
        return super().forward(query, key, value, attention_mask, **about)


def _rotate(part: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, ends: Any) -> torch.Tensor:
    """Return ``part`` [tokens, (batch,) heads, width] with positions, as the fused kernel computes it."""
    tokens = torch.arange(len(part))
    if ends is not None:
        tokens = torch.cat([torch.arange(size) for size in ends.diff().tolist()])
    shape = (len(part), *[1] * (part.dim() - 2), part.shape[-1])
    cos, sin = (table.flatten(1)[tokens].view(shape) for table in (cos, sin))
    part = torch.cat([part[..., 0::2], part[..., 1::2]], -1)
    half = part.shape[-1] // 2
    return part * cos + torch.cat([-part[..., half:], part[..., :half]], -1) * sin


def _queries(
    query: Any, cos: Any, sin: Any, head: int, width: int, ends: Any = None, *unused: Any
) -> torch.Tensor:
    return torch.cat([query[..., :head], _rotate(query[..., head:], cos, sin, ends)], -1)


def _keys_and_values(
    both: Any, positions: Any, cos: Any, sin: Any, width: int, head: int, values: int, ends: Any, *unused: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    rotated = _rotate(positions, cos, sin, ends).expand(*both.shape[:-1], width)
    return torch.cat([both[..., :head], rotated], -1), both[..., head:].contiguous()


# Megatron's kernels need a GPU.
multi_latent_attention.fused_apply_mla_rope_for_q = _queries
multi_latent_attention.fused_apply_mla_rope_for_kv = _keys_and_values


def predicting(config: Any, **arguments: Any) -> GPTModel:
    """A GPT with multi-token prediction, whose attention knows packs of documents."""
    is_latent = config.multi_latent_attention
    layer = get_gpt_layer_local_spec(multi_latent_attention=is_latent, normalization=config.normalization)
    attention = LatentAttention if is_latent else PackedAttention
    layer.submodules.self_attention.submodules.core_attention = attention
    prediction = get_gpt_mtp_block_spec(
        config, layer, use_transformer_engine=False, vp_stage=arguments["vp_stage"]
    )
    return GPTModel(config, layer, mtp_block_spec=prediction, position_embedding_type="rope", **arguments)


def batches(kind: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield batches of tokens, half of which count for the loss, the first ones of them less often."""
    generator, number = torch.Generator().manual_seed(7), 0
    if kind.get("packed"):
        of_batches: tuple[tuple[int, ...], ...] = PACKS
    else:
        of_batches = tuple((length,) for length in (LENGTHS if "variable_seq_lengths" in kind else (8,)))
    while True:
        sizes = of_batches[number % len(of_batches)]
        length, number = sum(sizes), number + 1
        tokens = torch.randint(0, own_loop.WORDS, (1, length + 1), generator=generator)
        mask = torch.rand(1, length, generator=generator) < torch.linspace(0, 1, length)
        mask[0, -1] = True
        yield {
            "input_ids": tokens[:, :-1],
            "labels": tokens[:, 1:] if kind.get("labels", True) else None,
            "loss_mask": mask.float() if kind.get("labels", True) else None,
            "position_ids": torch.cat([torch.arange(size) for size in sizes])[None],
            "attention_mask": None,
            **({"cu_seqlens": _ends(sizes)} if kind.get("packed") else {}),
        }


def _ends(sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)


def forward_step(iterator: Iterator[Any], model: Any) -> Any:
    """Megatron's forward step, with a mask of the tokens that count; without labels outputs are logits."""
    batch = next(iterator)
    ends = batch.pop("cu_seqlens", None)
    if ends is not None:
        longest = int(ends.diff().max())
        batch["packed_seq_params"] = PackedSeqParams(
            "thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest
        )
    mask, by_tokens = batch["loss_mask"], _config(model).calculate_per_token_loss

    def loss(output: torch.Tensor) -> Any:
        if mask is None:
            value = output.float().logsumexp(-1).mean()
            return value, {"loss": value.detach().clone()}
        total, tokens = (output.float() * mask).sum(), mask.sum()
        if by_tokens:
            return total, tokens.int(), {"loss": (total / tokens).detach()}
        return total / tokens, {"loss": (total / tokens).detach()}

    return model(**batch), loss


def _config(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model.config


def trained(chunks: int, depths: int = 1, packed: bool = False, labels: bool = True, **config: Any) -> Any:
    """Return the results of a run whose weights stay, and the losses of predictions that it logs."""
    kind = {"packed": packed, "labels": labels, **config}
    model = own_loop.build(
        chunks,
        model_class=predicting,
        mtp_num_layers=depths,
        mtp_loss_scaling_factor=0.3,
        mtp_standalone="pipeline_model_parallel_layout" in config,
        **config,
    )
    of_loop, own_loop.batches = own_loop.batches, lambda *_: batches(kind)
    MTPLossLoggingHelper.tracker.clear()
    try:
        about = {"seq_length": 1} if "variable_seq_lengths" in config else {}
        record = own_loop.train(model, COUNTS, rate=0.0, forward_step_func=forward_step, **about)
        logged = {
            name: value.tolist()
            for name, value in MTPLossLoggingHelper.tracker.items()
            if isinstance(value, torch.Tensor)
        }
        evaluated = own_loop.run_step(
            model,
            [own_loop.batches() for _ in model],
            4,
            forward_only=True,
            forward_step_func=forward_step,
            **about,
        )
    finally:
        own_loop.batches = of_loop
    return record, logged, [float(entry["loss"]) for entry in evaluated]


CORE = (
    ("1f1b", "unlike"),
    ("v-half", "equal, two"),
    ("v-half", "packs"),
    ("v-half", "packs, alone"),
    ("flex", "latent packs, fused"),
)
"""The cases that are always run, and not only in wide grids."""

CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "full recomputation": ("equal", FULL),
    "repeated, full recomputation": ("repeated", FULL),
    "repeated, selective recomputation": ("repeated", {"recompute_granularity": "selective"}),
    "packs, full recomputation": ("packs", FULL),
    "selective recomputation": ("packs", {"recompute_granularity": "selective"}),
    "latent, full recomputation": ("latent packs, fused", FULL),
    "latent, keys and values again": (
        "latent packs, fused",
        {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj", "core_attn"]},
    ),
    "alone": ("equal, two", {"pipeline_model_parallel_layout": [*map(list, ALONE)]}),
    "packs, alone": ("packs", {"pipeline_model_parallel_layout": [*map(list, ALONE)]}),
}
"""Changes of a kind that are trained under V-Half, and compared with the kind itself."""


def cases() -> list[tuple[str, str]]:
    """Return all cases: a schedule and a kind, or a change of one."""
    return [*((name, kind) for name in SCHEDULES for kind in KINDS), *(("v-half", name) for name in CHANGES)]


def whole_of(case: tuple[str, str]) -> str:
    """Return the kind whose whole microbatches a case is compared with."""
    _, name = case
    return CHANGES[name][0] if name in CHANGES else name


def on_rank(rank: int, is_wide: bool) -> dict[Any, Any]:
    """Return this rank's results."""
    own_loop.start()
    results: dict[Any, Any] = {}
    for case in cases() if is_wide else CORE:
        (schedule, name), kind = case, whole_of(case)
        if kind not in results:
            results[kind] = trained(1, **KINDS[kind])
        varies = "variable_seq_lengths" in KINDS[kind]
        with megatron_pp_ext.installed(
            schedule,
            ranks=2,
            microbatches=COUNTS[0],
            slice_tokens=6 if varies else 2,
            **SCHEDULES[schedule],
            **({"order": "rule"} if varies else {}),
        ) as line:
            _, more = CHANGES.get(name, ("", {}))
            results[case] = trained(line.chunks, **{**KINDS[kind], **more})
    return results


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(pickle.dumps(run_ranks(on_rank, 2, "wide" in sys.argv)))
