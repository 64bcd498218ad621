"""Features that the table of ``features`` cannot hold, and those whose stand-ins on a CPU need a proof."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

from megatron_pp_ext import pretrain_gpt
from megatron_pp_ext.schedule.actions import Kind
from megatron_pp_ext.schedule.recorded import Measured, RecordedStep
from tests.support import rounding
from tests.support.comparison import (
    assert_close,
    assert_same_bits,
    assert_same_gradients,
    assert_same_norms,
    run,
    stock,
    traced,
)
from tests.support.tiers import first
from tests.support.training import initialize_by_layer, since, train

PP2 = ("--pipeline-model-parallel-size", "2", "--num-layers", "4")
TP2 = ("--tensor-model-parallel-size", "2")


@pytest.mark.wide
def test_sequence_parallel_gradients_are_whole() -> None:
    """Each rank's norms see a part of the sequence: their gradients are summed, under stock and under a V."""
    sequence_parallel = (*PP2, *TP2, "--sequence-parallel")
    assert_close(stock(4, *sequence_parallel), stock(4, *PP2, *TP2))
    assert_same_bits(
        run(4, [*sequence_parallel, "--pipeline-schedule", "v-half"]), stock(4, *sequence_parallel)
    )


@pytest.mark.wide
def test_context_parallel_ranks_see_the_whole_sequence() -> None:
    """Under a V too, whose messages are half as long."""
    context_parallel = (*PP2, "--context-parallel-size", "2", "--position-embedding-type", "rope")
    assert_close(stock(4, *context_parallel), stock(2, *PP2, "--position-embedding-type", "rope"))
    assert_same_bits(run(4, [*context_parallel, "--pipeline-schedule", "v-zb"]), stock(4, *context_parallel))


def test_context_parallel_needs_plain_attention() -> None:
    with pytest.raises(AssertionError, match="--context-parallel-size 2 on a CPU is for causal attention"):
        train(2, ["--context-parallel-size", "2", "--window-size", "4,0"])


def test_a_step_that_overflows_is_skipped() -> None:
    """The loss scale falls until the gradients are finite, at the same step as under stock."""
    flags = [*PP2, "--num-layers", "8", "--train-iters", "5"]
    flags += ["--fp16", "--initial-loss-scale", str(2**24), "--hysteresis", "1"]
    theirs, ours = (train(2, [*flags, *ours])[-1] for ours in ([], ["--pipeline-schedule", "zb-h1"]))
    assert theirs.grad_norms[0] is None
    assert theirs.grad_norms[-1] is not None
    assert_same_norms(ours.grad_norms, theirs.grad_norms)
    assert ours.losses == theirs.losses


def _run_steps_twice(chunks: list[torch.nn.Module]) -> None:
    """What --rerun-mode report_stats is for; the flag's value is not one that its reader knows (0.19.2)."""
    initialize_by_layer(chunks)
    get_rerun_state_machine().set_mode(RerunMode.REPORT_DETERMINISM_STATS)


def _has_repeated_losses(chunks: list[torch.nn.Module]) -> bool:
    """Whether the losses of the first step were met by those of a second run, not whether they were equal.

    Megatron keeps the tensors, not their values, and divides them in place afterwards.
    """
    return any("loss of a microbatch" in caller.message for caller in get_rerun_state_machine().stats)


@since((0, 19), "megatron-core before 0.19 fails to print the statistics that it gathers")
def test_steps_that_run_twice() -> None:
    """Megatron's check for determinism runs every step again, on the same data."""
    flags = [*PP2, "--pipeline-schedule", "v-half", "--train-iters", "2"]
    ranks = train(2, flags, initialize=_run_steps_twice, grab=_has_repeated_losses)
    assert sorted(rank.grabbed for rank in ranks) == [False, True]
    assert ranks[-1].losses == stock(2, *PP2).losses
    assert_same_norms(ranks[-1].grad_norms, stock(2, *PP2).norms)


def _with_lengths_of_their_own(chunks: list[torch.nn.Module]) -> None:
    """Cut each microbatch to a length that its own first token tells."""
    initialize_by_layer(chunks)
    for chunk in chunks:
        chunk.config.variable_seq_lengths = True
    get_batch = pretrain_gpt.get_batch

    def cut(*args: Any) -> dict[str, Any]:
        batch = get_batch(*args)
        if batch["tokens"] is None:
            return batch
        length = 8 + int(batch["tokens"][0, 0]) % 24
        lengths.append(length)
        mask = batch.pop("attention_mask")
        return {
            "attention_mask": mask[..., :length, :length],
            **{name: field[:, :length].contiguous() for name, field in batch.items()},
        }

    lengths: list[int] = []
    pretrain_gpt.get_batch = cut


@pytest.mark.parametrize("schedule", first(1, ["v-half", "1f1b"]))
def test_sequences_of_several_lengths(schedule: str) -> None:
    flags = [*PP2, "--clip-grad", "0"]
    ours = run(2, [*flags, "--pipeline-schedule", schedule], initialize=_with_lengths_of_their_own)
    assert_same_bits(ours, run(2, flags, initialize=_with_lengths_of_their_own))


def test_a_skipped_step_passes_its_samples_over() -> None:
    """On every tensor-parallel rank, each of which reads, and for every chunk of a rank."""
    skips = (*PP2, "--global-batch-size", "4", "--train-iters", "4")
    skips += ("--iterations-to-skip", "2")
    theirs = stock(2, *skips)
    ours = run(4, (*skips, *TP2, "--pipeline-schedule", "v-half"))
    assert ours.losses == pytest.approx(theirs.losses, rel=rounding.of_losses(updates=3))


DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")
PP2_WITH_DROPOUT = ("--pipeline-model-parallel-size", "2", "--clip-grad", "0", *DROPOUT)
TWO_CHUNKS = ("--num-layers-per-virtual-pipeline-stage", "2")


def test_one_stage_a_rank_is_equal_to_stocks_1f1b() -> None:
    assert_same_bits(run(2, [*PP2_WITH_DROPOUT, "--pipeline-schedule", "zb-h1"]), stock(2, *PP2_WITH_DROPOUT))


def test_a_loop_is_equal_to_stocks_interleaved() -> None:
    ours = run(2, [*PP2_WITH_DROPOUT, *TWO_CHUNKS, "--pipeline-schedule", "interleaved-zb"])
    assert_same_bits(ours, stock(2, *PP2_WITH_DROPOUT, *TWO_CHUNKS))


def test_masks_follow_the_placement() -> None:
    """Neither stock's interleaved nor a V is equal to 1F1B, as the documents say."""
    line, loop = stock(2, *PP2_WITH_DROPOUT), stock(2, *PP2_WITH_DROPOUT, *TWO_CHUNKS)
    v = run(2, [*PP2_WITH_DROPOUT, "--pipeline-schedule", "v-half"])
    assert len({result.losses[0] for result in (line, loop, v)}) == 3


PIPELINE = ("--pipeline-model-parallel-size", "2")
SMALL = ("--num-layers", "4", "--global-batch-size", "4")
FULL = "--recompute-granularity full --recompute-method"
SELECTIVE = "--disable-bias-linear --recompute-granularity selective --recompute-modules"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
SHARED = f"{EXPERTS} --moe-shared-expert-intermediate-size 32"
DISTRIBUTED = f"{FULL} uniform --recompute-num-layers 1 --distribute-saved-activations"


# What Megatron recomputes by Transformer Engine's help (layernorm, moe_act) is not for a CPU, and "mlp" with
# biases is refused.
@pytest.mark.parametrize(
    ("flags", "schedule"),
    first(
        1,
        [
            (f"{SELECTIVE} moe {EXPERTS}", "zb-h1"),
            (f"{SELECTIVE} core_attn shared_experts {SHARED}", "v-half"),
            (f"{FULL} uniform --recompute-num-layers 2", "v-zb"),
            (f"{SELECTIVE} core_attn mlp", "v-half"),
        ],
    ),
)
def test_same_gradients_as_stock(flags: str, schedule: str) -> None:
    base = (*PIPELINE, *flags.split())
    assert_same_gradients(run(2, [*base, "--pipeline-schedule", *schedule.split()]), stock(2, *base))


@pytest.mark.wide
def test_a_trace_of_activations_that_tensor_ranks_share(tmp_path: Path) -> None:
    """Megatron cuts the data of a received activation, of which hooks on saved tensors keep copies."""
    base = (*PIPELINE, *SMALL, "--tensor-model-parallel-size", "2", *DISTRIBUTED.split())
    traced = ("--pipeline-schedule", "v-half", "--pipeline-trace", str(tmp_path / "trace.json"))
    assert_same_gradients(run(4, [*base, *traced]), stock(4, *base))


@pytest.mark.wide
def test_versions_of_weights_beside_activations_that_tensor_ranks_share() -> None:
    base = (*PIPELINE, *SMALL, "--tensor-model-parallel-size", "2", "--untie-embeddings-and-output-weights")
    base += ("--pipeline-schedule", "pipedream-2bw")
    whole = train(4, [*base, *FULL.split(), "uniform", "--recompute-num-layers", "1"])
    distributed = train(4, [*base, *DISTRIBUTED.split()])
    assert len(whole[-1].losses) == 3
    assert distributed[-1].losses == whole[-1].losses


PP2_DP2 = ("--pipeline-model-parallel-size", "2", "--num-layers", "4", "--clip-grad", "0")
REDUCE = ("--overlap-grad-reduce",)
SHARDED = ("--use-distributed-optimizer",)
GATHER = (*SHARDED, *REDUCE, "--overlap-param-gather")
UNALIGNED = ("--no-align-grad-reduce", "--no-align-param-gather")
SMALL_BUCKETS = ("--ddp-bucket-size", "1000")


@pytest.mark.parametrize(("name", "align"), first(1, [("v-half", UNALIGNED), ("interleaved", ())]))
def test_gathering_early_changes_nothing(name: str, align: tuple[str, ...]) -> None:
    """Evaluation stands between two steps: it must find whole weights and leave the hooks in order."""
    evaluation = ("--eval-interval", "2", "--eval-iters", "1")
    ours = run(4, [*PP2_DP2, *evaluation, *GATHER, *align, "--pipeline-schedule", name])
    theirs = stock(4, *PP2_DP2, *evaluation, *SHARDED)
    assert_same_bits(ours, theirs)
    assert ours.validation == theirs.validation


INSTANCES = (*SHARDED, "--num-distributed-optimizer-instances", "2", "--calculate-per-token-loss")


def _by_levels(ranks: Any, pattern: str, **sizes: int) -> Any:
    """Return what einops does with Megatron's one pattern of groups within groups."""
    assert pattern == "(l s u) -> (l u) s"
    levels = ranks.reshape(sizes["l"], sizes["s"], sizes["u"]).transpose(0, 2, 1)
    return levels.reshape(-1, sizes["s"])


@pytest.mark.parametrize(
    ("ranks", "name", "flags"),
    first(
        1,
        [
            (4, "v-half", GATHER),
            (4, "zb-h1", (*GATHER, *UNALIGNED)),
            (8, "zb-h1", GATHER),
            (8, "interleaved", ()),
        ],
    ),
)
def test_instances_of_the_distributed_optimizer(
    ranks: int, name: str, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step reduces gradients once, within an instance and across both; sums of tokens show it.

    Stock reduces those of the first step twice with --overlap-grad-reduce, so that it is without here.
    """
    if not parallel_state.HAVE_EINOPS:
        monkeypatch.setattr(parallel_state, "HAVE_EINOPS", True)
        monkeypatch.setattr(parallel_state, "einops", SimpleNamespace(rearrange=_by_levels), raising=False)
    ours = run(ranks, [*PP2_DP2, *INSTANCES, *flags, "--train-iters", "3", "--pipeline-schedule", name])
    theirs = stock(ranks, *PP2_DP2, *INSTANCES, "--train-iters", "3")
    if ranks == 4:
        assert_same_bits(ours, theirs)
    else:
        assert_close(ours, theirs)  # of four replicas each bucket is summed in parts of its own


def last_of_chunks(step: RecordedStep, rank: int, kind: Kind) -> list[Measured]:
    """The last action of this kind of each chunk of ``rank``."""
    found = {
        step.placement.chunk_of(event.action.stage): event
        for event in step.records[rank].events
        if event.action.kind is kind
    }
    return [found[chunk] for chunk in range(step.placement.chunks)]


def test_a_chunk_leaves_in_its_last_weight_gradient() -> None:
    step = traced(4, [*PP2_DP2, "--pipeline-schedule", "v-half", *REDUCE])
    for rank, record in enumerate(step.records):
        last = last_of_chunks(step, rank, Kind.W)
        assert {reduction.chunk for reduction in record.reductions} == {0, 1}
        assert all(last[chunk].start < start <= last[chunk].end for chunk, start, _ in record.reductions)
        # The chunk that is done first travels while the other still computes.
        first = min(record.reductions, key=lambda reduction: reduction.start)
        assert first.start < record.events[-1].start < first.end


def test_a_bucket_leaves_when_it_is_full() -> None:
    """Buckets of the first chunk: one of norms alone in its last I, the others in W."""
    step = traced(4, [*PP2_DP2, "--pipeline-schedule", "v-half", *REDUCE, *UNALIGNED, *SMALL_BUCKETS])
    last_input, last_weight = (last_of_chunks(step, 0, kind)[0] for kind in (Kind.I, Kind.W))
    starts = sorted(reduction.start for reduction in step.records[0].reductions if reduction.chunk == 0)
    assert all(last_input.start < start < last_weight.end for start in starts)
    in_weight = [start for start in starts if start > last_weight.start]
    assert len(in_weight) > 2
