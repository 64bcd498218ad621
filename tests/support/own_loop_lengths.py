"""What ``tests/features/units/megatron/test_by_length.py`` compares, written to the file that it is given.

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
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

import megatron_pp_ext
from megatron_pp_ext.features.units.megatron import sliced_stage
from tests.support import own_loop, own_loop_experts
from tests.support.few_trials import few_trials

COUNTS = (6, 4)
LENGTHS = (8, 21, 5, 32, 3, 11)
PACKS = ((3, 19, 4, 2), (12,), (5, 5, 5), (2, 9, 17))
TOKENS = 6
SCHEDULES = {
    "1f1b": {"order": "rule"},
    "v-half": {"order": "rule"},
    "flex": {"order": "search", "memory_limit": 0.7},
}
BATCHES, FORWARD_STEP = own_loop.batches, own_loop.forward_step


class PackedAttention(DotProductAttention):
    """Local attention that knows packs of documents, as Transformer Engine's does."""

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, **about: Any) -> Any:
        """See ``DotProductAttention``; a pack has no batch."""
        packed = about.pop("packed_seq_params", None)
        if packed is None:
            return super().forward(query, key, value, attention_mask, **about)
        sizes = packed.cu_seqlens_q.diff()
        of = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        apart = (of[:, None] != of[None, :]) | torch.ones(len(of), len(of)).triu(1).bool()
        about["attn_mask_type"] = AttnMaskType.arbitrary
        alone = (part[:, None] for part in (query, key, value))
        return super().forward(*alone, apart[None, None], **about).squeeze(1)


def packed_gpt(config: Any, **arguments: Any) -> GPTModel:
    """A GPT with rotary positions whose attention knows packs."""
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    return GPTModel(config, spec, position_embedding_type="rope", **arguments)


def packed_batches(*unused: Any) -> Iterator[dict[str, Any]]:
    """Yield batches of packed documents, without a mask."""
    generator, number = torch.Generator().manual_seed(7), 0
    while True:
        sizes = PACKS[number % len(PACKS)]
        number += 1
        tokens = torch.randint(0, own_loop.WORDS, (1, sum(sizes) + 1), generator=generator)
        ends = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
        yield {
            "input_ids": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "position_ids": torch.cat([torch.arange(size) for size in sizes])[None],
            "attention_mask": None,
            "cu_seqlens": ends,
        }


def packed_step(iterator: Iterator[Any], model: Any) -> Any:
    """The forward step of packed documents, of which each token weighs by its place in the pack."""
    batch = next(iterator)
    ends = batch.pop("cu_seqlens")
    longest = int(ends.diff().max())
    params = PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
    weights = torch.linspace(0.5, 1.5, batch["input_ids"].shape[1])

    def loss(losses: torch.Tensor, non_loss_data: bool = False) -> Any:
        mean = (losses.float().flatten() * weights).sum() / weights.sum()
        return mean, {"loss": mean.detach().clone()}

    return model(**batch, packed_seq_params=params), loss


def trained(chunks: int, **about: Any) -> own_loop.Record:
    """Return the results of sequences of unlike length."""
    model = own_loop.build(chunks, variable_seq_lengths=True, moe_token_dispatcher_type="alltoall", **about)
    return own_loop.train(model, COUNTS, LENGTHS, seq_length=1)


def evaluated(chunks: int) -> tuple[list[float], int]:
    """Return the losses of an evaluation after a step of training, and the calls of a chunk in it."""
    model = own_loop.build(chunks, variable_seq_lengths=True, moe_token_dispatcher_type="alltoall")
    own_loop.train(model, COUNTS[:1], LENGTHS, seq_length=1)
    calls = list[None]()
    model[0].register_forward_hook(lambda *_: calls.append(None))
    iterators = [own_loop.batches(LENGTHS) for _ in model]
    losses = own_loop.run_step(model, iterators, len(LENGTHS), forward_only=True, seq_length=1)
    return [float(entry["loss"]) for entry in losses], len(calls)


def packed(chunks: int) -> own_loop.Record:
    """Return the results of packed documents."""
    own_loop.batches, own_loop.forward_step = packed_batches, packed_step
    try:
        model = own_loop.build(
            chunks, model_class=packed_gpt, variable_seq_lengths=True, moe_token_dispatcher_type="alltoall"
        )
        return own_loop.train(model, COUNTS, seq_length=1, forward_step_func=packed_step)
    finally:
        own_loop.batches, own_loop.forward_step = BATCHES, FORWARD_STEP


def of_experts() -> tuple[own_loop.Record, dict[str, list[float]]]:
    """Return the results of experts with unlike numbers of slices, and their routers' log.

    The router's loss is one whose mean over tokens is that of slices by their tokens.
    """
    model = own_loop.build(
        1,
        model_class=own_loop_experts.gpt_of_experts,
        variable_seq_lengths=True,
        moe_z_loss_coeff=0.1,
        **{**own_loop_experts.EXPERTS, "expert_model_parallel_size": 1},
    )
    logged = {name: values.clone() for name, values in sliced_stage._logged().items()}
    record = own_loop.train(model, COUNTS, LENGTHS, seq_length=1)
    return record, {
        name: (values - logged.get(name, 0)).tolist() for name, values in sliced_stage._logged().items()
    }


def pair_step(iterator: Iterator[Any], model: Any) -> Any:
    """The forward step of packs whose documents are compared with each other."""
    batch = next(iterator)
    ends = batch.pop("cu_seqlens")
    longest = int(ends.diff().max())
    params = PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)

    def loss(losses: torch.Tensor) -> Any:
        value = losses.float().flatten().square().mean().log()
        return value, {"loss": value.detach()}

    return model(**batch, packed_seq_params=params), loss


def error_of(step: Any, data: Any, **about: Any) -> str:
    """Return the error of a training step; empty where there is none."""
    model = own_loop.build(
        1, model_class=packed_gpt, variable_seq_lengths=True, moe_token_dispatcher_type="alltoall"
    )
    try:
        own_loop.run_step(model, [data()], 4, forward_step_func=step, seq_length=1, **about)
    except RuntimeError as error:
        return str(error)
    return ""


def rows() -> Iterator[dict[str, Any]]:
    """Yield batches of three rows."""
    for batch in own_loop.batches():
        yield {name: value.expand(3, *value.shape[1:]) for name, value in batch.items()}


def on_rank(rank: int) -> dict[Any, Any]:
    """Return this rank's results."""
    own_loop.start()
    results: dict[Any, Any] = {
        "stock": trained(1),
        "stock packed": packed(1),
        "stock evaluated": evaluated(1),
    }
    results["stock experts"] = of_experts()
    with megatron_pp_ext.installed(
        "1f1b", ranks=2, microbatches=COUNTS[0], slice_tokens=TOKENS, order="rule"
    ):
        results["experts"] = of_experts()
        results["rows"] = error_of(own_loop.forward_step, rows)
        results["pairs"] = error_of(pair_step, packed_batches)
        results["sums"] = error_of(packed_step, packed_batches)
    for name, about in SCHEDULES.items():
        for kind, train in (("", trained), (" packed", packed)):
            with megatron_pp_ext.installed(
                name, ranks=2, microbatches=COUNTS[0], slice_tokens=TOKENS, **about
            ) as line:
                results[name + kind] = train(line.chunks)
                if not kind:
                    results[name + " evaluated"] = evaluated(line.chunks)
            results["line"] = str(line)
    return results


if __name__ == "__main__":
    file = Path(sys.argv[1])
    with few_trials(str(file.parent)):
        file.write_bytes(pickle.dumps(run_ranks(on_rank, 2)))
