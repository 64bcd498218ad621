"""What ``tests/features/units/megatron/test_probe.py`` looks at, written to the file that it is given.

All of it runs in a process of its own, in which Megatron is as it comes.
"""

import pickle
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from tests.support.ranks import run_ranks  # isort: skip  (the stand-ins come before Megatron)

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

import megatron_pp_ext
from tests.support import mixing_models, own_loop


def on_rank(rank: int) -> dict[str, Any]:
    """Return the error and the lines of a step of each model."""
    own_loop.start()
    results: dict[str, Any] = {}
    with megatron_pp_ext.installed("1f1b", ranks=2, microbatches=2, slice_tokens=4):
        for name, (_, model_class, about) in mixing_models.MODELS.items():
            results[name] = stepped(model_class, about)
        results["untouched"] = untouched()
        results["an argument of its own"] = stepped(
            mixing_models.with_scale, {}, forward_step_func=mixing_models.step_with_scale
        )
    _, shifting, about = mixing_models.MODELS["token shift"]
    with megatron_pp_ext.installed("1f1b", ranks=2, microbatches=2, slice_tokens=4, slice_check="off"):
        results["left out"] = stepped(shifting, about)
    more = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    with megatron_pp_ext.installed("1f1b", ranks=2, microbatches=2, slice_tokens=4, order="rule"):
        results["by length"] = stepped(shifting, {**about, **more}, seq_length=1)
    with megatron_pp_ext.installed("1f1b", ranks=2, microbatches=2, slice_tokens=512, order="rule"):
        results["more tokens than positions"] = stepped(own_loop.gpt, more, seq_length=1)
    return results


def stepped(model_class: Any, about: dict[str, Any], **step: Any) -> tuple[str, str]:
    """Return the error of a training step, and the printed lines."""
    with redirect_stdout(StringIO()) as printed:
        model = own_loop.build(1, model_class=model_class, **about)
        try:
            own_loop.run_step(model, [own_loop.batches()], 2, **step)
        except ValueError as error:
            return str(error), printed.getvalue()
    return "", printed.getvalue()


def untouched() -> list[str]:
    """Return what the check of a model with experts changes."""
    from megatron_pp_ext.features.units.megatron import layers, probe

    _, model_class, about = mixing_models.MODELS["experts"]
    (chunk,) = own_loop.build(1, model_class=model_class, **about)
    model = chunk.module
    layers.Calls(chunk)
    model.decoder.layers[1].eval()
    router = model.decoder.layers[0].mlp.router

    def state() -> dict[str, list[Any]]:
        tracker = get_cuda_rng_tracker().get_states()
        return {
            "modes": [module.training for module in model.modules()],
            "buffers": [buffer.clone() for buffer in model.buffers()],
            "random numbers": [
                torch.get_rng_state(),
                *(generator_state.clone() for generator_state in tracker.values()),
            ],
            "input": [model.decoder.input_tensor is None],
            "hooks": [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in model.modules()],
        }

    before = state()
    with probe._aside(model):
        probe._Probe(model, model.config, 4, 0, 1).run()
        torch.rand(1)
        router.local_tokens_per_expert.add_(1)
        router.expert_bias = router.expert_bias + 1
    after = state()
    return [name for name in before if not all(map(_is_same, before[name], after[name]))]


def _is_same(value: Any, other: Any) -> bool:
    return torch.equal(value, other) if isinstance(value, torch.Tensor) else bool(value == other)


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(pickle.dumps(run_ranks(on_rank, 2)))
