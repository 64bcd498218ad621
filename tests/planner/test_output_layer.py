"""The output layer and the loss: what waits for the end of a step, and what each kind of loss keeps."""

import pytest

from megatron_pp_ext.costs import system
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner import described
from megatron_pp_ext.planner.step.estimate import Estimate, estimate_request

MICROBATCHES = 32
MODEL = (
    "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --vocab-size 128000 "
    "--max-position-embeddings 4096 --bf16 --untie-embeddings-and-output-weights "
    f"--micro-batch-size 1 --global-batch-size {MICROBATCHES} --pipeline-model-parallel-size 4"
)
LOGITS = 4096 * 128000
DEFER = ("--defer-embedding-wgrad-compute", "--wgrad-deferral-limit")


def estimated(*more: str) -> Estimate:
    asked = described.read([*MODEL.split(), *more], None).counted()
    return estimate_request(asked, system.read("h100"), for_world(asked, 4))


def test_only_microbatches_within_the_limit_keep_what_deferred_gradients_read() -> None:
    """As megatron.core.tensor_parallel.layers does: 0 defers those of all microbatches."""
    plain = estimated().ranks[-1].loss
    waiting = {limit: estimated(*DEFER, limit).ranks[-1].loss - plain for limit in ("8", "16", "32", "0")}
    each = 2 * (LOGITS + 4096 * 4096)
    assert waiting == {
        limit: pytest.approx(count * each) for limit, count in zip(waiting, (8, 16, 32, 32), strict=True)
    }


def test_what_is_not_deferred_is_computed_in_its_backward() -> None:
    none, some, every = (estimated(*flags) for flags in ((), (*DEFER, "8"), (*DEFER, "0")))
    assert none.pipeline_seconds > some.pipeline_seconds > every.pipeline_seconds
    assert 0 < some.other_seconds - none.other_seconds < every.other_seconds - none.other_seconds


def test_a_limit_without_deferring_changes_nothing() -> None:
    assert estimated(DEFER[1], "8") == estimated()


def test_a_loss_in_the_place_of_the_logits_keeps_less() -> None:
    fused = "--cross-entropy-loss-fusion"
    plain, native = estimated(), estimated(fused)
    in_place = estimated(fused, "--cross-entropy-fusion-impl", "te")
    # A compiled loss has a copy of the logits in fp32, one in their place has none of them besides.
    assert native.ranks[-1].loss - plain.ranks[-1].loss == pytest.approx(4 * LOGITS)
    assert plain.ranks[-1].loss - in_place.ranks[-1].loss == pytest.approx(2 * LOGITS)
    # Half of what fp32 probabilities take, for the one microbatch that the last rank has in flight.
    kept = plain.ranks[-1].activations - in_place.ranks[-1].activations
    assert kept == pytest.approx(2 * LOGITS)
    assert plain.step_seconds > native.step_seconds > in_place.step_seconds
