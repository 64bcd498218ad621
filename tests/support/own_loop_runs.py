"""The runs of ``tests/megatron/test_install.py``: under stock and under installed schedules.

All of them run in one process a rank, in which megatron.training cannot be imported.  As a program it writes
what the two ranks found to the file that it is given.
"""

import gc
import importlib
import pickle
import pkgutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any


class NoTrainer:
    """Finds no megatron.training."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[:2] == ["megatron", "training"]:
            raise ImportError(f"{name} is not there")


sys.meta_path.insert(0, NoTrainer())


from tests.support.ranks import run_ranks  # isort: skip  # noqa: E402 (the stand-ins come before Megatron)

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.pipeline_parallel import schedules as stock_schedules  # noqa: E402

import megatron_pp_ext  # noqa: E402
from megatron_pp_ext.compiler.request import named  # noqa: E402
from megatron_pp_ext.compiler.source import Source  # noqa: E402
from megatron_pp_ext.features.guided.order import ProfileSteps  # noqa: E402
from megatron_pp_ext.features.offload import megatron  # noqa: E402
from megatron_pp_ext.features.offload.runtime.offloaded_activations import OffloadedActivations  # noqa: E402
from megatron_pp_ext.megatron import core, core_hooks, patching, requested, runners, start_up  # noqa: E402
from megatron_pp_ext.megatron.releases import CORE_0_19, megatron_release  # noqa: E402
from megatron_pp_ext.schedule.costs import CostModel, Costs  # noqa: E402
from tests.support import own_loop  # noqa: E402
from tests.support.few_trials import few_trials  # noqa: E402

LENGTHS = (8, 5, 7, 3)


def on_rank(rank: int, folder: str) -> dict[Any, Any]:
    """Return this rank's results, by the names under which tests look for them."""
    own_loop.start()
    stock_names = _names()
    results: dict[Any, Any] = {}
    for tied in (False, True):
        results["stock", tied] = own_loop.train(own_loop.build(1, tied), own_loop.COUNTS)
    results["stock", "lengths"] = _lengths(1)
    results["stock", "passes"] = _passes(own_loop.build(1))
    for name, chunks in own_loop.CHUNKS.items():
        limit = {"memory_limit": 0.8} if name == "flex" else {}
        results["line", name] = str(megatron_pp_ext.install(name, ranks=2, microbatches=8, **limit))
        for tied in (False, True) if name in own_loop.TIED else (False,):
            results[name, tied] = own_loop.train(own_loop.build(chunks, tied), own_loop.COUNTS)
    for tied in (False, True):
        with megatron_pp_ext.installed("v-half", ranks=2, microbatches=8, loss_rank="first"):
            results["first rank", tied] = own_loop.train(own_loop.build(2, tied), own_loop.COUNTS)
    gc.collect()
    megatron_pp_ext.uninstall()
    if megatron_release() >= CORE_0_19:
        results["stock", "hybrid"] = own_loop.train(own_loop.build(1, model_class=own_loop.hybrid), (3,))
        with megatron_pp_ext.installed("v-half", ranks=2, microbatches=3):
            results["v-half", "hybrid"] = own_loop.train(own_loop.build(2, model_class=own_loop.hybrid), (3,))
        gc.collect()
        megatron_pp_ext.uninstall()
    results["predictions"] = _predictions()
    gc.collect()
    megatron_pp_ext.uninstall()
    results["restored"] = _names() == stock_names
    results["again"] = own_loop.train(own_loop.build(1), own_loop.COUNTS)
    trace = Path(folder, "trace.json")
    megatron_pp_ext.install("v-half", ranks=2, microbatches=3, trace=trace, timeout=5, order="given")
    results["v-half", "lengths"] = _lengths(2)
    results["v-half", "passes"] = _passes(own_loop.build(2))
    results["trace"] = trace.exists()
    gc.collect()
    megatron_pp_ext.uninstall()
    with megatron_pp_ext.installed("zb-h1", ranks=2, microbatches=8, vocabulary="shared"):
        results["shared"], results["collecting"], results["doubling"] = _shared(rank)
    results["offloaded"] = _offloaded()
    results["several"] = _several()
    results["refused"] = _refused()
    results["arrived"] = _arrived()
    return results


def core_alone(rank: int) -> list[tuple[str, str]]:
    """Import every module; return for several schedules the line that is printed, and who runs a step."""
    for room in (core, runners):
        for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
            importlib.import_module(module.name)
    patching.apply(core_hooks.CORE)

    costs = CostModel(Costs.unit)
    steps = []
    for name, more in (("v-half", ()), ("zb-h1", (ProfileSteps(2, 3),)), ("auto", ())):
        request = replace(named(name, 2, 4), options=more)
        pipeline = requested.Pipeline(request, Source(request, costs))
        line = start_up.summary(pipeline, costs)
        requested.activate(pipeline)
        steps.append((line, type(stock_schedules.get_forward_backward_func()).__name__))
    return steps


def _names() -> list[int]:
    """Return the objects of some of the replaced names, one of them imported here."""
    return [
        id(stock_schedules.get_forward_backward_func),
        id(parallel_state.is_pipeline_last_stage),
        id(own_loop.GPTModel.__init__),
        id(is_pipeline_last_stage),
    ]


is_pipeline_last_stage = parallel_state.is_pipeline_last_stage


def _predictions() -> dict[Any, tuple[own_loop.Record, list[torch.Tensor]]]:
    """Runs of a model that predicts with the loss under stock and before it under a V.

    With each come this rank's copies of the embedding as Megatron builds them.
    """
    kinds = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
    runs: dict[Any, Any] = {}

    def train(name: str, layout: str, tied: bool, is_list: bool = True) -> None:
        copies: list[torch.Tensor] = []

        def build(config: Any, **arguments: Any) -> Any:
            model = own_loop.predicting(config, **arguments)
            if hasattr(model, "embedding"):
                copies.append(model.embedding.word_embeddings.weight)
            if arguments["vp_stage"] != 0:  # the last one
                copies[:] = [copy.detach().clone() for copy in copies]
            return model

        stages = [[kinds[letter] for letter in stage] for stage in layout.split("|")]
        more = {
            "mtp_num_layers": 1,
            "mtp_loss_scaling_factor": 0.1,  # some commits have no default
            "pipeline_model_parallel_layout": stages if is_list else layout,
        }
        model = own_loop.build(len(stages) // 2, tied, model_class=build, **more)
        runs[name, tied, is_list] = own_loop.train(model, own_loop.COUNTS), copies

    for tied in (False, True):
        train("stock", "Etttt|ttttmL", tied)
    for rank in ("last", "first"):
        with megatron_pp_ext.installed("v-half", ranks=2, microbatches=8, loss_rank=rank):
            for tied, is_list in ((False, True), (False, False), (True, True)):
                train(rank, "Ett|ttt|tttm|L", tied, is_list)
    return runs


def _lengths(chunks: int) -> own_loop.Record:
    """Train on microbatches of different lengths, as trainers do that announce none of them."""
    model = own_loop.build(chunks, variable_seq_lengths=True, moe_token_dispatcher_type="alltoall")
    return own_loop.train(model, (3, 5), LENGTHS, seq_length=1)


def _passes(model: list[Any]) -> list[Any]:
    """Return losses of an evaluation, and the collection of a log-probability pass, before any training."""
    iterators = [own_loop.batches() for _ in model]
    losses = own_loop.run_step(model, iterators, 3, forward_only=True)
    collected = own_loop.run_step(model, iterators, 2, forward_only=True, collect_non_loss_data=True)
    return [[float(entry["loss"]) for entry in losses], collected]


def _shared(rank: int) -> tuple[own_loop.Record, str, str]:
    """Train with a shared vocabulary; return the lines that refuse what needs logits, too.

    That is to collect other data than losses, and a forward step that changes what its model returns.
    """
    model = own_loop.build(1, tied=True)
    record = own_loop.train(model, own_loop.COUNTS)
    collecting = _step(model, forward_only=True, collect_non_loss_data=True)

    def doubling(iterator: Any, model: Any) -> Any:
        output, loss = own_loop.forward_step(iterator, model)
        return output * 2, loss

    def step() -> None:
        own_loop.run_step(model, [own_loop.batches()], own_loop.COUNTS[-1], forward_step_func=doubling)

    # The first rank has the first stage, and fails before its first message.
    return record, collecting, _error(step) if rank == 0 else ""


def _offloaded() -> tuple[own_loop.Record, list[int]]:
    """Train with activations on the host; return the bytes that steps have sent there, too."""
    sizes: list[int] = []

    class Telling(OffloadedActivations):
        def close(self) -> None:
            super().close()
            sizes.append(self.offloaded_bytes)

    megatron.SMALLEST, megatron.OffloadedActivations = 1, Telling
    with megatron_pp_ext.installed("v-half", ranks=2, microbatches=8, offload=0.5):
        return own_loop.train(own_loop.build(2), own_loop.COUNTS), sizes


def _several() -> dict[str, own_loop.Record]:
    """Train three models of one process in turn, of which one has stock's schedule."""
    models = {"stock": own_loop.build(1)}
    with megatron_pp_ext.installed("v-half", ranks=2, microbatches=8, costs=[1e-3] * 4) as in_force:
        models["v-half"] = own_loop.build(2)
        layers = [part.layer_number for chunk in models["v-half"] for part in chunk.module.decoder.layers]
    with megatron_pp_ext.installed("zb-h1", ranks=2, microbatches=8):
        models["zb-h1"] = own_loop.build(1)
    assert in_force.metrics() == {}
    records = {name: own_loop.train(model, (8,)) for name, model in models.items()}
    records["metrics"] = in_force.metrics()
    for model in models.values():
        own_loop.run_step(model, [own_loop.batches() for _ in model], 2, forward_only=True)
    records["offsets"] = _offsets(models["v-half"]), layers
    return records


def _offsets(model: list[Any]) -> list[int]:
    """Return the numbers of the layers as Megatron's functions tell them outside of the context."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    numbers: list[int] = []
    for chunk, part in enumerate(model):
        first = get_transformer_layer_offset(part.config, vp_stage=chunk) + 1
        numbers += range(first, first + get_num_layers_to_build(part.config, vp_stage=chunk))
    return numbers


def _refused() -> dict[Any, str]:
    """Return the lines that refuse models which were not built for the schedule that they are to run by."""
    gc.collect()
    megatron_pp_ext.uninstall()
    errors = {"built before": _built_before(), **_built_under_v_half()}
    gc.collect()
    megatron_pp_ext.install("v-min", ranks=2, microbatches=8)  # nothing is built for v-half any more
    megatron_pp_ext.install("zb-h1", ranks=4, microbatches=8)
    errors["ranks"] = _error(lambda: own_loop.build(1))
    megatron_pp_ext.install("1f1b", ranks=2, microbatches=8)
    errors["config"] = _with_a_setting_that_cannot_be("config", "delay_wgrad_compute")
    errors["data parallelism"] = _with_a_setting_that_cannot_be("ddp_config", "use_megatron_fsdp")
    gc.collect()
    megatron_pp_ext.uninstall()
    errors["one config"] = _one_config_for_two_models()
    for unproved in (False, True):
        with megatron_pp_ext.installed("1f1b", ranks=2, microbatches=8, unproved=unproved):
            errors["graphs", unproved] = _step(own_loop.build(1, cuda_graph_impl="transformer_engine"))
    return errors


def _step(model: list[Any], **about: Any) -> str:
    return _error(lambda: own_loop.run_step(model, [own_loop.batches() for _ in model], 2, **about))


def _built_before() -> str:
    model = own_loop.build(2)
    megatron_pp_ext.install("v-half", ranks=2, microbatches=8)
    return _step(model)


def _built_under_v_half() -> dict[str, str]:
    errors = {"chunks": _error(lambda: own_loop.build(1))}
    model = own_loop.build(2)
    errors["one chunk"] = _step(model[:1])
    errors["changed"] = _error(lambda: megatron_pp_ext.install("v-min", ranks=2, microbatches=8))
    errors["left"] = _error(megatron_pp_ext.uninstall)
    errors["still trains"] = _step(model)
    return errors


def _with_a_setting_that_cannot_be(of: str, setting: str) -> str:
    model = own_loop.build(1)
    setattr(getattr(model[0], of), setting, True)
    return _step(model)


def _one_config_for_two_models() -> str:
    with megatron_pp_ext.installed("v-half", ranks=2, microbatches=8):
        config = own_loop.build(2)[0].config
    spec = own_loop.get_gpt_layer_local_spec()
    return _error(lambda: own_loop.GPTModel(config, spec, own_loop.WORDS, own_loop.LENGTH, vp_stage=0))


def _arrived() -> str:
    """Return the line for a config that was made for a schedule and copied to where none is installed."""
    with megatron_pp_ext.installed("zb-h1", ranks=2, microbatches=8):
        copied = pickle.dumps(own_loop.config_of(1))
    gc.collect()
    megatron_pp_ext.uninstall()
    model = own_loop.build(1, config=pickle.loads(copied))
    return _error(lambda: own_loop.run_step(model, [own_loop.batches()], 2))


def _error(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    (file,) = sys.argv[1:]
    folder = str(Path(file).parent)
    with few_trials(folder):
        found = run_ranks(on_rank, 2, folder)
        (found[0]["core alone"],) = run_ranks(core_alone, 1)
        Path(file).write_bytes(pickle.dumps(found))
