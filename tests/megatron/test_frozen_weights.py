"""Jobs that freeze weights, and jobs whose weights carry marks and hooks, train as under stock.

What a job freezes it freezes when it builds its model (``frozen``).
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel

from megatron_pp_ext.features.vocabulary.megatron.dealing import VocabularyPart
from megatron_pp_ext.runtime.split import STORE
from tests.support import frozen
from tests.support.comparison import assert_close, assert_same_bits, run, stock
from tests.support.ranks import RankError
from tests.support.tiers import first
from tests.support.training import train

PP2 = ("--pipeline-model-parallel-size", "2", "--num-layers", "4", "--clip-grad", "0")
UNTIED = "--untie-embeddings-and-output-weights"
SHARED = ("--pipeline-vocabulary", "shared")
OVERLAP = ("--overlap-grad-reduce", "--ddp-bucket-size", "2000")


@pytest.mark.parametrize(
    ("kind", "schedule", "ranks", "extra"),
    first(
        1,
        [
            ("embedding", "v-half", 2, ()),
            ("output", "zb-h1", 4, OVERLAP),
            ("all-but-norms", "interleaved", 4, OVERLAP),
        ],
    ),
)
def test_trains_what_is_not_frozen(kind: str, schedule: str, ranks: int, extra: tuple[str, ...]) -> None:
    """The kinds that the table of ``features`` has not."""
    flags = (*PP2, UNTIED, frozen.FLAG, kind, *extra)
    ours = (*flags, "--pipeline-schedule", schedule)
    theirs = stock(ranks, *flags)
    assert_same_bits(run(ranks, ours), theirs)
    assert_close(run(ranks, [*ours, *SHARED]), theirs)


def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[GPTModel], None]) -> None:
    """Let every model be changed as the last thing of building it, as a script does."""
    init = GPTModel.__init__

    @functools.wraps(init)
    def build(model: GPTModel, *args: Any, **kwargs: Any) -> None:
        init(model, *args, **kwargs)
        change(model)

    monkeypatch.setattr(GPTModel, "__init__", build)


def _mark_vocabulary(model: GPTModel) -> None:
    for part in ("embedding.word_embeddings", "output_layer"):
        for name, weight in model.named_parameters():
            if name == f"{part}.weight":
                weight.requires_grad_(part == "output_layer")
                weight.of_mine = part
                weight.told = dict(vars(weight))


def _told(chunks: list[torch.nn.Module]) -> dict[str, Any]:
    found = {}
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, VocabularyPart) and module.weight is not None:
                weight = module.weight
                assert weight.told.items() <= vars(weight).items()
                found[weight.of_mine] = weight.requires_grad, weight.told
    return found


def test_rows_carry_all_that_the_weight_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On all ranks, whoever has built it: what Megatron wrote on it, and what a script did."""
    changed(monkeypatch, _mark_vocabulary)
    flags = [*PP2, UNTIED, "--use-mup", "--mup-width-mult", "2.0", "--train-iters", "1", *SHARED]
    first, last = (run.grabbed for run in train(2, [*flags, "--pipeline-schedule", "v-half"], grab=_told))
    assert first == last
    assert [trains for trains, _ in first.values()] == [False, True]
    marks = {"tensor_model_parallel", "is_embedding_or_output_parameter", "is_embedding_parameter", "of_mine"}
    assert all(marks <= told.keys() for _, told in first.values())


def _freeze_one_end(model: GPTModel) -> None:
    for name, weight in model.named_parameters():
        weight.requires_grad_(not name.startswith("embedding."))


@pytest.mark.parametrize("flags", first(1, ["v-half", "1f1b", "v-half --pipeline-vocabulary shared"]))
def test_a_tied_weight_that_is_frozen_at_one_end_is_refused(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock waits for ever for the gradient of the frozen copy."""
    changed(monkeypatch, _freeze_one_end)
    with pytest.raises(RankError, match=r"word_embeddings\.weight is frozen .*; freeze all of them"):
        train(2, [*PP2, "--pipeline-schedule", *flags.split()])


def _add_adapter(model: GPTModel) -> None:
    if model.pre_process:
        model.embedding.word_embeddings.adapter = torch.nn.Linear(1, 1, bias=False)


def _hook_output(model: GPTModel) -> None:
    if model.post_process:
        model.output_layer.register_forward_hook(lambda *_: None)


def _hook_gradient(model: GPTModel) -> None:
    if model.pre_process:
        model.embedding.word_embeddings.weight.register_hook(torch.zeros_like)


def _mark_with_a_function(model: GPTModel) -> None:
    if model.post_process:
        model.output_layer.weight.decays = lambda: False


def _fuse_the_loss(model: GPTModel) -> None:
    model.config.cross_entropy_loss_fusion, model.config.cross_entropy_fusion_impl = True, "linear"


@pytest.mark.parametrize(
    ("change", "problem"),
    first(
        1,
        [
            (_add_adapter, "embedding has adapter.weight in addition to its weight"),
            (_hook_output, "output layer has hooks"),
            (_fuse_the_loss, "output layer is one kernel with the loss"),
            (_hook_gradient, "embedding has a weight that has a gradient hook"),
            (_mark_with_a_function, "output layer has a weight that has an attribute 'decays'"),
        ],
    ),
)
def test_what_rows_cannot_carry_is_refused(
    change: Callable[[GPTModel], None], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(monkeypatch, change)
    with pytest.raises(RankError, match=f"SettingExit: megatron_pp_ext: .* the model's {problem}"):
        train(2, [*PP2, UNTIED, "--pipeline-schedule", "zb-h1", *SHARED])


def _halve_gradients(model: GPTModel) -> None:
    for name, weight in model.named_parameters():
        if name.endswith("linear_fc1.weight"):
            weight.register_hook(lambda gradient: gradient / 2)


def test_hooks_of_weights_see_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    changed(monkeypatch, _halve_gradients)
    assert_same_bits(run(2, [*PP2, "--pipeline-schedule", "v-half"]), run(2, PP2))


def test_frozen_weights_leave_no_work_for_w(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that waits are the products of the adapters, one for each microbatch and layer of the rank."""
    waiting: list[int] = []
    defer = STORE.defer

    def counted(*args: Any, **kwargs: Any) -> None:
        waiting.append(len(args))
        defer(*args, **kwargs)

    monkeypatch.setattr(STORE, "defer", counted)
    flags = [*PP2, frozen.FLAG, "adapters", "--pipeline-schedule", "zb-h1"]
    runs = train(2, flags, grab=lambda chunks: len(waiting))
    assert [run.grabbed for run in runs] == [8 * 2] * 2
