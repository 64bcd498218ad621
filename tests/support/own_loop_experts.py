"""What ``tests/features/units/megatron/test_shared_experts.py`` compares, written to the given file.

All of it runs in a process of its own, in which Megatron is as it comes.
"""

import pickle
import sys
from pathlib import Path
from typing import Any

from tests.support.ranks import run_ranks  # isort: skip  (the stand-ins come before Megatron)

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

import megatron_pp_ext
from tests.support import own_loop
from tests.support.few_trials import few_trials

COUNTS = (4, 3)
LENGTHS = ((8, 21, 9, 32, 14), (30, 7, 25, 12, 6))
"""The lengths of the data of each of two pipelines."""

TOKENS = 6
SCHEDULES: dict[str, dict[str, Any]] = {
    "zb-h1": {"order": "rule"},
    "flex": {"order": "search", "memory_limit": 0.9},
}
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
    "expert_model_parallel_size": 2,
    "add_bias_linear": False,
}


def gpt_of_experts(config: Any, **arguments: Any) -> GPTModel:
    """A GPT all of whose layers have experts."""
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
    return GPTModel(config, spec, position_embedding_type="rope", **arguments)


def trained(chunks: int) -> tuple[own_loop.Record, list[float]]:
    """Return the results of a run, and the losses of an evaluation after it."""
    model = own_loop.build(chunks, model_class=gpt_of_experts, variable_seq_lengths=True, **EXPERTS)
    replica = parallel_state.get_data_parallel_rank()
    lengths = LENGTHS[replica]
    record = own_loop.train(model, COUNTS, lengths, seed=replica, seq_length=1)
    iterators = [own_loop.batches(lengths, replica) for _ in model]
    losses = own_loop.run_step(model, iterators, COUNTS[0], forward_only=True, seq_length=1)
    return record, [float(entry["loss"]) for entry in losses]


def on_rank(rank: int) -> dict[str, Any]:
    """Return this rank's results."""
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 2, expert_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    results: dict[str, Any] = {"stock": trained(1)}
    for name, about in SCHEDULES.items():
        with megatron_pp_ext.installed(
            name, ranks=2, microbatches=COUNTS[0], slice_tokens=TOKENS, **about
        ) as line:
            results[name] = trained(line.chunks if name == "flex" else 1)
    return results


if __name__ == "__main__":
    file = Path(sys.argv[1])
    with few_trials(str(file.parent)):
        file.write_bytes(pickle.dumps(run_ranks(on_rank, 4)))
