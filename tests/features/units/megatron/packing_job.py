"""A step on what Megatron's packer hands over, for a checkout that has one; ``test_packing`` starts it.

Prints, as JSON, for each rank: the packed documents' ends by Megatron and by cost, and the losses of a step
under Megatron's schedule and under one of ours in a planned order.
"""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from tests.support.ranks import run_ranks

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets import data_schedule
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

import megatron_pp_ext
from megatron_pp_ext.features.units.megatron.packer import pack_by_cost
from tests.support import own_loop

LENGTHS = 8, 5, 3, 16, 2, 9, 1, 4


def samples(replica: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Yield documents as a dataset of Megatron's that packs nothing itself."""
    generator = torch.Generator().manual_seed(replica)
    while True:
        length = LENGTHS[int(torch.randint(0, len(LENGTHS), (1,), generator=generator))]
        tokens = torch.randint(0, own_loop.WORDS, (length + 1,), generator=generator)
        number = torch.tensor([length])
        yield [
            {
                "tokens": tokens[:-1],
                "labels": tokens[1:],
                "loss_mask": torch.ones(length),
                "position_ids": torch.arange(length),
                "original_seq_len": number,
                "padded_seq_len": number.clone(),
            }
        ]


def packed(chunks: int = 1) -> tuple[Any, int]:
    """Return the iterator of a step, or those of all chunks, and its number of microbatches."""
    config: Any = SimpleNamespace(
        sequence_packing_scheduler="dp_balanced",
        max_seqlen_per_dp_cp_rank=20,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        microbatch_group_size_per_vp_stage=None,
    )
    replica = parallel_state.get_data_parallel_rank()
    data = [samples(replica)] * chunks if chunks > 1 else samples(replica)
    iterator, microbatches, *_ = data_schedule.wrap_data_iterator(data, config, 12)
    return iterator, microbatches


def ends() -> list[list[int]]:
    iterator, microbatches = packed()
    return [next(iterator)["cu_seqlens"].tolist() for _ in range(microbatches)]


def forward_step(iterator: Any, model: Any) -> Any:
    """Run a packed batch, whose attention a mask keeps within documents."""
    batch = next(iterator)
    lengths = batch["cu_seqlens"].diff().tolist()
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    apart = document[:, None] != document[None]
    later = torch.triu(torch.ones(len(document), len(document)), 1).bool()
    # Chunks in the middle have the lengths alone.
    names = {"tokens": "input_ids", "labels": "labels", "position_ids": "position_ids"}
    rows = {argument: batch[name][None] if name in batch else None for name, argument in names.items()}
    output = model(attention_mask=(apart | later)[None, None], **rows)
    return output, own_loop._mean


def losses(chunks: int = 1) -> list[float]:
    model = own_loop.build(chunks, variable_seq_lengths=True, moe_token_dispatcher_type="alltoall")
    iterator, microbatches = packed(chunks)
    iterators = iterator if chunks > 1 else [iterator]
    found = own_loop.run_step(model, iterators, microbatches, forward_step_func=forward_step, seq_length=1)
    return [float(one["loss"]) for one in found]


def on_rank(rank: int) -> Any:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 2)
    model_parallel_cuda_manual_seed(1)
    given, stock = ends(), losses()
    pack_by_cost("1f1b", ranks=2, equal_at=8)
    by_cost, stock_by_cost = ends(), losses()
    with megatron_pp_ext.installed("zb-h1", ranks=2, microbatches=8, order="rule"):
        ours = losses()
    with megatron_pp_ext.installed("v-half", ranks=2, microbatches=8, order="rule"):
        in_v = losses(2)
    return {
        "given": given,
        "by_cost": by_cost,
        "stock": stock,
        "stock_by_cost": stock_by_cost,
        "ours": ours,
        "in_v": in_v,
    }


if __name__ == "__main__":
    print(json.dumps(run_ranks(on_rank, 4, timeout=240)))
