"""Megatron's fine-grained offloading under our schedules: stock's bits, with bytes that really move.

Its manager asks of a tensor whether it is on a device, and of Transformer Engine to leave weights alone.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.extensions import transformer_engine
from megatron.core.pipeline_parallel import fine_grained_activation_offload as fine_grained
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.support.comparison import assert_same_bits, run, stock, traced
from tests.support.tiers import first
from tests.support.training import initialize_by_layer

PP2 = "--pipeline-model-parallel-size 2"
VARYING = "--eval-interval 1 --eval-iters 2 --clip-grad 0 --rampup-batch-size 2 2 12 --train-samples 20"
EXPERTS = (
    "--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 --disable-bias-linear "
    "--moe-token-dispatcher-type alltoall --clip-grad 0"
)


MODULES = ("attn_norm", "qkv_linear", "mlp_norm")
"""With core_attn, Megatron's own 1F1B has other gradients where attention is not Transformer Engine's."""


def switch_on(monkeypatch: pytest.MonkeyPatch, modules: Sequence[str] = MODULES, **settings: Any) -> None:
    """Let ranks that are forked from here offload ``modules``; ``settings`` are those of the config."""
    check = TransformerConfig.__post_init__

    def check_with_offload(config: TransformerConfig) -> None:
        config.fine_grained_activation_offloading = True
        config.offload_modules = list(modules)
        config.min_offloaded_tensor_size = 1
        for name, value in settings.items():
            setattr(config, name, value)
        check(config)

    monkeypatch.setattr(TransformerConfig, "__post_init__", check_with_offload)
    monkeypatch.setattr(transformer_engine, "cpu_offload", SimpleNamespace(CPUOffloadEnabled=False))
    handler = fine_grained.ChunkOffloadHandler
    if hasattr(handler, "_can_manage_tensor_for_offload"):
        can_manage = staticmethod(lambda tensor: type(tensor) is torch.Tensor)
        monkeypatch.setattr(handler, "_can_manage_tensor_for_offload", can_manage)


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
            ("1f1b", 2, "", {"delta_offload_bytes_across_pp_ranks": 1000}),
            ("interleaved", 2, "--recompute-granularity selective", {}),
            ("v-half", 4, EXPERTS, {"modules": ("expert_fc1", "moe_act", "attn_norm")}),
        ],
    ),
)
def test_same_bits_as_stock_and_bytes_move(
    name: str, ranks: int, flags: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = stock(ranks, *PP2.split(), *flags.split())
    switch_on(monkeypatch, **settings)
    initialize = must_move(monkeypatch)
    words = [*PP2.split(), *flags.split(), "--pipeline-schedule", *name.split()]
    ours = run(ranks, words, initialize=initialize)
    assert_same_bits(ours, theirs)
    assert ours.validation == theirs.validation


@pytest.mark.wide
def test_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"{PP2} {EXPERTS} --bf16 --accumulate-allreduce-grads-in-fp32".split()
    theirs = stock(4, *flags, "--num-layers-per-virtual-pipeline-stage", "2")
    switch_on(monkeypatch, ("mlp_norm",))
    initialize = must_move(monkeypatch)
    flags += ["--overlap-moe-expert-parallel-comm", "--pipeline-schedule", "dualpipe-v"]
    assert_same_bits(run(4, flags, initialize=initialize), theirs)


@pytest.mark.wide
def test_what_is_away_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of a trace: what is in no group counts as ever, and what moves counts while it is here."""
    flags = f"{PP2} --pipeline-schedule gpipe".split()
    here = traced(2, flags)
    switch_on(monkeypatch)
    away = traced(2, flags, initialize=must_move(monkeypatch))
    for stays, leaves in zip(here.records, away.records, strict=True):
        assert 0.4 * stays.peak_bytes < leaves.peak_bytes < 0.95 * stays.peak_bytes
        assert stays.events[-1].live_bytes == leaves.events[-1].live_bytes == 0
