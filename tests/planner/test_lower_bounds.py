"""Bounds for all cuts of the layers hold for each of them, and are sums that stages give too."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from megatron_pp_ext.costs import system
from megatron_pp_ext.features.pairs.order import Pairs
from megatron_pp_ext.planner.search.candidate import Candidate, Recompute
from megatron_pp_ext.planner.search.replays import CandidateCuts, Workloads, short_memory
from megatron_pp_ext.planner.step.estimate import StepModel
from megatron_pp_ext.planner.step.model_description import describe
from megatron_pp_ext.planner.step.programs import program
from megatron_pp_ext.schedule import catalog
from tests.support import rounding

ROUNDED = rounding.relative(eps=rounding.FLOAT64)
DENSE = {
    "num_layers": 13, "hidden_size": 2048, "num_attention_heads": 16, "seq_length": 2048,
    "vocab_size": 64000, "bf16": True, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip
EXPERTS = DENSE | {
    "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 1024, "moe_layer_freq": [0] * 3 + [1] * 10,
    "moe_token_dispatcher_type": "alltoall", "mtp_num_layers": 1,
}  # fmt: skip
PAIRS = EXPERTS | {"overlap_moe_expert_parallel_comm": True}
NONE = Recompute("none")
RECOMPUTES = (
    NONE,
    Recompute("half", "full", "block", 2),
    Recompute("full", "full", "uniform", 1),
    Recompute("groups", "full", "uniform", 3),
)
CASES = [
    *((DENSE, recompute, name, False) for recompute in RECOMPUTES for name in ("1f1b", "v-zb")),
    *((EXPERTS, recompute, name, False) for recompute in RECOMPUTES for name in ("interleaved", "zb-h2")),
    *((PAIRS, NONE, name, False) for name in ("1f1b", "interleaved", "dualpipe-v")),
    *((DENSE, NONE, name, True) for name in ("1f1b", "zb-h1", "v-half", "breadth-first")),
]


def candidate_of(model, recompute, name, shares):
    is_paired = "overlap_moe_expert_parallel_comm" in model
    sizes = (2, 1, 4 if "num_experts" in model else 1, 3, 4, 1, 7)
    chunks = 1 if name in ("1f1b", "zb-h1", "zb-h2") else 2
    return Candidate(*sizes, recompute, name, chunks, shares, options=(Pairs(),) if is_paired else ())


def random_cut(random, layers, least):
    """A cut of all ``layers`` in which each stage has its ``least`` or more."""
    left = layers - sum(least)
    marks = sorted(random.choices(range(left + 1), k=len(least) - 1))
    return tuple(
        few + end - start for few, (start, end) in zip(least, pairwise([0, *marks, left]), strict=True)
    )


@pytest.mark.parametrize(("model", "recompute", "name", "shares"), CASES)
def test_no_cut_is_below_the_bounds(model, recompute, name, shares):
    job = describe(model | {"micro_batch_size": 1})
    machine = system.read("h100")
    workloads, random = Workloads(job, machine), Random(name)
    candidate = candidate_of(model, recompute, name, shares)
    placement, microbatches = candidate.placement, candidate.microbatches
    mean = workloads.mean(candidate, placement)
    is_split = catalog.abilities(name).splits_backward
    least, bound = mean.memory(microbatches, 0.05), mean.bounds(microbatches)[is_split]
    order = program(name, 3, microbatches, candidate.chunks, shares, candidate.options)
    stages = workloads.stages(candidate, placement)
    for _ in range(8):
        cut = random_cut(random, stages.items, stages.least)
        if not stages.can_be(cut):
            continue
        work = workloads.work(replace(candidate, layout=stages.layout(cut)))
        found = StepModel(work, order, name, microbatches).estimate()
        assert found.step_seconds >= bound * (1 - ROUNDED)
        if recompute.method != "block":
            assert found.fullest.total >= least.total * (1 - ROUNDED)


@pytest.mark.parametrize(("model", "recompute", "name", "shares"), CASES)
def test_the_mean_rank_is_the_mean_of_the_ranks(model, recompute, name, shares):
    job = describe(model | {"micro_batch_size": 1})
    workloads = Workloads(job, system.read("h100"))
    candidate = candidate_of(model, recompute, name, shares)
    mean = workloads.mean(candidate, candidate.placement)
    ranks = workloads.work(candidate, layers=mean.work.layers).by_rank
    for what in (
        "forward_seconds", "input_gradient_seconds", "weight_gradient_seconds", "overlapped_in_whole",
        "overlapped_together", "after_forward", "parameters", "expert_parameters",
    ):  # fmt: skip
        expected = sum(getattr(rank, what) for rank in ranks) / len(ranks)
        assert getattr(mean.part, what) == pytest.approx(expected, rel=ROUNDED)


@pytest.mark.parametrize(("model", "recompute", "name", "shares"), CASES)
def test_the_memory_of_cuts_in_turn_is_that_of_each_alone(model, recompute, name, shares):
    """They share what they count of a rank, where its stages are the same."""
    candidate, random = candidate_of(model, recompute, name, shares), Random(name)
    workloads = Workloads(describe(model | {"micro_batch_size": 1}), system.read("h100"))
    stages = workloads.stages(candidate, candidate.placement)
    cuts = CandidateCuts(candidate, stages, workloads, 0.05, 80e9)
    tried = [cut for _ in range(6) if stages.can_be(cut := random_cut(random, stages.items, stages.least))]
    assert len(set(tried)) > 1
    for cut in tried:
        assert cuts.memory(cut) == short_memory(candidate, cuts.work(cut), 0.05)
