"""Megatron's fine-grained offloading under our schedules: stock's bits, with bytes that really move."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron.core.pipeline_parallel import fine_grained_activation_offload as fine_grained

from megatron_pp_ext.view import trace_file
from tests.support import fine_grained as support
from tests.support.comparison import assert_same_bits, run, stock
from tests.support.tiers import first
from tests.support.training import initialize_by_layer, train

PP2 = "--pipeline-model-parallel-size 2"
VARYING = "--eval-interval 1 --eval-iters 2 --clip-grad 0 --rampup-batch-size 2 2 12 --train-samples 20"
EXPERTS = (
    "--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 --disable-bias-linear "
    "--moe-token-dispatcher-type alltoall --clip-grad 0"
)


class Bytes:
    """The bytes that went to the host and came back on this rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gone = self.back = 0
        handler = fine_grained.ChunkOffloadHandler
        offload, reload = handler.offload, handler.reload

        def counted_offload(chunk: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self.gone += tensor.nbytes
            return offload(chunk, tensor, *args, **kwargs)

        def counted_reload(chunk: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
            self.back += state[1].nbytes
            return reload(chunk, state, *args, **kwargs)

        monkeypatch.setattr(handler, "offload", counted_offload)
        monkeypatch.setattr(handler, "reload", counted_reload)


def must_move(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Any]], None]:
    """Return what sets the weights of a rank, which fails unless all that leaves it in a step comes back."""
    moved = Bytes(monkeypatch)

    def initialize(chunks: list[Any]) -> None:
        initialize_by_layer(chunks)
        reset = fine_grained.PipelineOffloadManager.reset

        def reset_after_a_step(manager: Any, *args: Any, **kwargs: Any) -> None:
            if manager._cached_chunks_forward:
                assert moved.gone == moved.back > 0
            reset(manager, *args, **kwargs)

        fine_grained.PipelineOffloadManager.reset = reset_after_a_step

    return initialize


@pytest.mark.parametrize(
    ("name", "ranks", "flags", "settings"),
    first(
        1,
        [
            ("v-half", 2, VARYING, {}),
            ("zb-h1", 2, "", {"activation_offload_fraction": 0.5}),
            *((name, 2, "", {}) for name in ("1f1b", "interleaved", "v-half", "v-zb", "dualpipe-v", "gpipe")),
            ("flex --pipeline-memory-limit 1.25", 2, "", {"delta_offload_bytes_across_pp_ranks": 1000}),
            ("zb-h1", 2, "--recompute-granularity selective", {}),
            ("v-half", 4, EXPERTS, {"modules": ("expert_fc1", "moe_act", "attn_norm")}),
        ],
    ),
)
def test_same_bits_as_stock_and_bytes_move(
    name: str, ranks: int, flags: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = stock(ranks, *PP2.split(), *flags.split())
    support.switch_on(monkeypatch, **settings)
    initialize = must_move(monkeypatch)
    words = [*PP2.split(), *flags.split(), "--pipeline-schedule", *name.split()]
    ours = run(ranks, words, initialize=initialize)
    assert_same_bits(ours, theirs)
    assert ours.validation == theirs.validation


@pytest.mark.wide
@pytest.mark.parametrize("schedule", ["dualpipe-v", "1f1b", "interleaved"])
def test_pairs(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"{PP2} {EXPERTS} --bf16 --accumulate-allreduce-grads-in-fp32".split()
    theirs = stock(4, *flags, "--num-layers-per-virtual-pipeline-stage", "2")
    support.switch_on(monkeypatch, ("mlp_norm",))
    initialize = must_move(monkeypatch)
    flags += ["--overlap-moe-expert-parallel-comm", "--pipeline-schedule", schedule]
    assert_same_bits(run(4, flags, initialize=initialize), theirs)


@pytest.mark.wide
def test_what_is_away_is_not_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The bytes of a trace: what is in no group counts as ever, and what moves counts while it is here."""
    flags = f"{PP2} --pipeline-schedule gpipe --pipeline-trace".split()
    train(2, [*flags, str(tmp_path / "here.json")])
    support.switch_on(monkeypatch)
    train(2, [*flags, str(tmp_path / "away.json")], initialize=must_move(monkeypatch))
    here, away = (trace_file.read(tmp_path / f"{name}.json").records for name in ("here", "away"))
    for stays, leaves in zip(here, away, strict=True):
        assert 0.4 * stays.peak_bytes < leaves.peak_bytes < 0.95 * stays.peak_bytes
        assert stays.events[-1].live_bytes == leaves.events[-1].live_bytes == 0
