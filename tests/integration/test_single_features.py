"""Features that the table of ``features`` cannot hold, and those whose stand-ins on a CPU need a proof."""

from typing import Any

import pytest
import torch
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

from megatron_pp_ext import pretrain_gpt
from tests.support import rounding
from tests.support.comparison import assert_close, assert_same_bits, assert_same_norms, run, stock
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
