"""What ``tests/features/units/megatron/test_shared_units.py`` compares, written to the file that it is given.

The second word is the number of context-parallel ranks, and a third one asks for all schedules.  All of it
runs in a process of its own, in which Megatron is as it comes.
"""

import copy
import pickle
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from tests.support.ranks import run_ranks  # isort: skip  (the stand-ins come before Megatron)

import torch
import torch.distributed as dist
from megatron.core import parallel_state, utils
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

import megatron_pp_ext
from megatron_pp_ext.features.units import runtime as prefixes
from megatron_pp_ext.features.units.megatron import context_parallel
from megatron_pp_ext.megatron.core.parameters import global_parameters
from tests.support import own_loop

COUNT, TOKENS = 5, 12
LENGTHS = ((8,), (20,), (4,), (32,), (12,))
PACKS = ((4, 20, 4), (12,), (8, 4, 8), (4, 8, 16), (8,))
SCHEDULES = {
    "1f1b": {"order": "rule"},
    "v-half": {"order": "rule"},
    "flex": {"order": "search", "memory_limit": 0.7},
}
LAYERS = 4
SIZES = {"num_layers": LAYERS, "hidden_size": 16, "num_attention_heads": 4}
LATENT = {
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 4, "qk_pos_emb_head_dim": 4, "v_head_dim": 4},
    **{"rotary_scaling_factor": 4, "original_max_position_embeddings": 16, "multi_latent_attention": True},
}


class Kind(NamedTuple):
    """A model and its data."""

    step: tuple[tuple[int, ...], ...]
    latent: bool = False
    depths: int = 0
    """The layers of multi-token prediction."""
    per_token: bool = True
    """Whether Megatron divides by the tokens of the step, in the place of the loss function."""

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """The heads of queries, those of keys, and the widths of a key and of a value."""
        return (4, 4, 8, 4) if self.latent else (4, 2, 4, 4)


KINDS = {
    "lengths": Kind(LENGTHS),
    "packs": Kind(PACKS),
    "latent packs": Kind(PACKS, latent=True),
    "predictions": Kind(LENGTHS, depths=1),
    "predictions of packs": Kind(PACKS, depths=2, per_token=False),
}
QUICK = (("1f1b", "lengths"), ("v-half", "latent packs"), ("v-half", "predictions of packs"))


class CheckedAttention(DotProductAttention):
    """Attention that asks what Transformer Engine's does: as many heads of keys as it was made for, values of
    the width that it was made for, in packs that of queries, and no group that shares a sequence."""

    def __init__(self, config: Any, *args: Any, v_channels: int | None = None, **kwargs: Any) -> None:
        kwargs.pop("k_channels", None)
        plain = copy.copy(config)
        plain.context_parallel_size = 1
        super().__init__(plain, *args, **kwargs)
        self.cp_group = parallel_state.get_context_parallel_group()
        self.hidden_size_per_attention_head_v = v_channels or config.kv_channels
        self.num_gqa_groups_per_partition = self.num_query_groups_per_partition

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """See ``DotProductAttention``."""
        assert self.cp_group is None or self.cp_group.size() == 1, "a prefix under context parallelism"
        assert key.shape[-2] == value.shape[-2] == self.num_gqa_groups_per_partition
        assert value.shape[-1] == self.hidden_size_per_attention_head_v
        after = len(key) - len(query)
        hidden = torch.arange(len(key)) > after + torch.arange(len(query))[:, None]
        if packed_seq_params is not None:
            assert query.dim() == 3 and value.shape[-1] == query.shape[-1]
            sizes = packed_seq_params.cu_seqlens_q.diff()
            document = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
            hidden |= document[:, None] != document
            query, key, value = (tensor[:, None] for tensor in (query, key, value))
        elif attention_mask is not None:
            assert torch.equal(attention_mask[0, 0], hidden)
        copies = query.shape[2] // key.shape[2]
        key, value = (tensor.repeat_interleave(copies, dim=2) for tensor in (key, value))
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * self.softmax_scale
        probabilities = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        context = torch.einsum("bhqk,kbhd->qbhd", probabilities, value).flatten(2)
        return context if packed_seq_params is None else context.squeeze(1)


def gpt(config: Any, latent: bool = False, **arguments: Any) -> GPTModel:
    """A GPT with rotary positions and ``CheckedAttention``."""
    spec = get_gpt_layer_local_spec(multi_latent_attention=latent)
    spec.submodules.self_attention.submodules.core_attention = CheckedAttention
    if config.mtp_num_layers:
        arguments["mtp_block_spec"] = get_gpt_mtp_block_spec(
            config, spec, use_transformer_engine=False, vp_stage=arguments["vp_stage"]
        )
    return GPTModel(config, spec, position_embedding_type="none" if latent else "rope", **arguments)


def batches(step: tuple[tuple[int, ...], ...]) -> Iterator[dict[str, Any]]:
    """Yield batches of these documents, fewer of whose later tokens count."""
    generator = torch.Generator().manual_seed(7)
    while True:
        for sizes in step:
            total = sum(sizes)
            tokens = torch.randint(0, own_loop.WORDS, (1, total + 1), generator=generator)
            batch = {
                "tokens": tokens[:, :-1],
                "labels": tokens[:, 1:],
                "loss_mask": (
                    torch.rand(1, total, generator=generator) < torch.linspace(0.9, 0.3, total)
                ).float(),
                "position_ids": torch.cat([torch.arange(size) for size in sizes])[None],
                "attention_mask": None,
                "cu_seqlens": None,
            }
            if len(sizes) > 1:
                batch["cu_seqlens"] = torch.tensor([[0, *accumulate(sizes)]], dtype=torch.int32)
            yield batch


def forward_step(iterator: Iterator[dict[str, Any]], model: Any) -> Any:
    """The forward step of Megatron's script: the batch of this rank, and a sum of losses with its tokens."""
    batch = dict(next(iterator))
    tokens = batch["loss_mask"].sum()
    batch["cu_seqlens_padded"] = batch["cu_seqlens"]
    group = parallel_state.get_context_parallel_group()
    batch = utils.get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
    params, ends = None, batch["cu_seqlens"]
    if ends is not None:
        longest = int(ends.diff().max())
        params = PackedSeqParams("thd", ends[0], ends[0], max_seqlen_q=longest, max_seqlen_kv=longest)
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=params,
    )
    if model.config.calculate_per_token_loss:
        return output, partial(_loss, batch["loss_mask"])
    return output, partial(_part_of_mean, batch["loss_mask"], tokens)


def _loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    loss = (losses.float() * mask).sum()
    tokens = mask.sum().to(torch.int)
    return loss, tokens, {"loss": torch.stack([loss.detach(), tokens.float()])}


def _part_of_mean(mask: torch.Tensor, tokens: torch.Tensor, losses: torch.Tensor) -> Any:
    """A loss whose parts Megatron adds up over the ranks, each of which has counted all tokens."""
    loss = (losses.float() * mask).sum()
    return loss / tokens, {"loss": torch.stack([loss.detach(), mask.sum()])}


def start(context: int) -> None:
    """Make the process groups of pipelines of 2 ranks with so many context-parallel ones."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, 2, context_parallel_size=context)
    model_parallel_cuda_manual_seed(1)


def trained(kind: Kind, chunks: int, context: int) -> dict[str, Any]:
    """Return the results of one step on this rank.

    These are the sums of losses and tokens, and gradients by global names; the numbers that all storages of
    keys and of values ``kept``; the bytes that were ``exchanged`` in forwards and backwards, and in how many
    ``exchanges``; the number of ``units``; and the losses of predictions that are ``logged``.
    """
    parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks if chunks > 1 else None)
    config_class = MLATransformerConfig if kind.latent else TransformerConfig
    config = config_class(
        **SIZES,
        **(LATENT if kind.latent else {"num_query_groups": 2}),
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        context_parallel_size=context,
        calculate_per_token_loss=kind.per_token,
        mtp_num_layers=kind.depths or None,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = own_loop.build(chunks, config=config, model_class=partial(gpt, latent=kind.latent))
    kept, sent, calls = list[int](), list[int](), list[None]()

    class Counted(prefixes.Prefix):
        def __init__(self, *about: Any) -> None:
            super().__init__(*about)
            if torch.is_grad_enabled():  # not in the check before the first step
                kept.append(self.kept.numel())

    def exchange(result: torch.Tensor, tensor: torch.Tensor, **about: Any) -> Any:
        sent.append(tensor.nbytes)
        return all_to_all(result, tensor, **about)

    def count(*unused: Any) -> None:
        if torch.is_grad_enabled():
            calls.append(None)

    model[0].register_forward_hook(count)
    MTPLossLoggingHelper.tracker.clear()
    all_to_all: Callable[..., Any] = dist.all_to_all_single
    with (
        patch.object(prefixes, "Prefix", Counted),
        patch.object(context_parallel.dist, "all_to_all_single", exchange),
    ):
        iterators = [batches(kind.step) for _ in model]
        losses = own_loop.run_step(model, iterators, COUNT, forward_step_func=forward_step, seq_length=1)
    return {
        "losses": [entry["loss"] for entry in losses],
        "gradients": {name: parameter.main_grad.clone() for name, parameter in global_parameters(model)},
        "logged": MTPLossLoggingHelper.tracker.get("loss_values"),
        "kept": sum(kept),
        "exchanged": sum(sent),
        "exchanges": len(sent),
        "units": len(calls),
    }


def on_rank(rank: int, context: int, is_wide: bool) -> dict[Any, Any]:
    """Return this rank's results, by schedule, kind of data and context-parallel ranks."""
    dist.init_process_group("gloo")
    results: dict[Any, Any] = {}
    cases = [(name, kind) for name in SCHEDULES for kind in KINDS] if is_wide else QUICK
    start(1)  # replicas have the same data, and so the gradients of one
    for _, kind in dict.fromkeys(cases):
        if (kind, 1) not in results:
            results[kind, 1] = trained(KINDS[kind], 1, 1)
    for ranks in (1, context):
        start(ranks)
        for name, kind in cases:
            with megatron_pp_ext.installed(
                name, ranks=2, microbatches=COUNT, slice_tokens=TOKENS, **SCHEDULES[name]
            ) as line:
                chunks = {"1f1b": 1, "v-half": 2}.get(name, line.chunks)
                results[name, kind, ranks] = trained(KINDS[kind], chunks, ranks)
    return results


if __name__ == "__main__":
    file, context, *words = sys.argv[1:]
    found = run_ranks(on_rank, 2 * int(context), int(context), bool(words))
    Path(file).write_bytes(pickle.dumps(found))
