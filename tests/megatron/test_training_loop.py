"""What Megatron's training loop does between steps: larger batches, evaluation on several or whole sets."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron.core import parallel_state

import megatron_pp_ext
from megatron_pp_ext.megatron import workarounds
from megatron_pp_ext.text_data import prepare
from tests.support import own_loop, rounding
from tests.support.comparison import assert_same_bits, assert_same_norms, run, stock
from tests.support.ranks import run_ranks
from tests.support.training import train

PP2 = ("--pipeline-model-parallel-size", "2", "--num-layers", "4")
STOCK: tuple[str, ...] = ()
OVERFLOWS = ("--fp16", "--initial-loss-scale", str(2**24), "--hysteresis", "1")


def schedule(name: str) -> tuple[str, ...]:
    return ("--pipeline-schedule", name)


def write(folder: Path, lines: int) -> str:
    """Make a data set of about eight tokens a line; return its prefix."""
    (folder / "text").write_text("".join(f"line {number}\n" for number in range(lines)))
    prepare(folder / "text", folder / f"data-{lines}")
    return str(folder / f"data-{lines}")


@pytest.mark.wide
@pytest.mark.parametrize("name", ["v-half", "zb-h1"])
def test_evaluation_while_fp16_skips_steps(name: str) -> None:
    flags = (*PP2, *OVERFLOWS, "--train-iters", "6", "--num-layers", "8")
    flags += ("--use-distributed-optimizer", "--overlap-grad-reduce")
    flags += ("--eval-interval", "1", "--eval-iters", "1", "--clip-grad", "0")
    ours, theirs = run(4, [*flags, *schedule(name)]), stock(4, *flags)
    assert theirs.norms[0] is None
    assert theirs.norms[-1] is not None
    assert ours.losses == theirs.losses
    assert ours.validation == theirs.validation
    assert len(ours.validation) == 8
    assert_same_norms(ours.norms, theirs.norms)


def test_batches_grow_as_under_stock(tmp_path: Path) -> None:
    """Twelve steps of 2, 4 and 6 samples."""
    data = ("--data-path", write(tmp_path, 80), "--vocab-size", "257", "--split", "100,0,0")
    growing = (*PP2, *data, "--step-batch-size-schedule", "0:2 64:4 192:6", "--train-samples", "66")
    ours, theirs = (run(2, [*growing, "--clip-grad", "0", *more]) for more in (schedule("v-half"), STOCK))
    assert len(ours.losses) == 12
    assert_same_bits(ours, theirs)


@pytest.mark.wide
def test_several_validation_sets(tmp_path: Path) -> None:
    sets = [write(tmp_path, 40), write(tmp_path, 30)]
    flags = (*PP2, "--train-data-path", sets[0], "--valid-data-path", *sets, "--vocab-size", "257")
    flags += ("--multiple-validation-sets", "--full-validation", "--eval-interval", "2", "--eval-iters", "1")
    flags += ("--global-batch-size", "2", "--clip-grad", "0")
    ours, theirs = (train(2, [*flags, *more])[-1] for more in (schedule("zb-h1"), STOCK))
    assert ours.losses == theirs.losses
    assert ours.validation == theirs.validation
    assert len(ours.validation) == 4
    assert ours.validation[0] != pytest.approx(ours.validation[1], rel=rounding.of_losses(updates=2))


@pytest.mark.parametrize("iterators", [2, 1, 0])
def test_every_iterator_passes_the_samples_of_a_step(iterators: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data of all chunks of a rank is passed over once; some chunks read none, and some ranks neither."""
    runs = iter([True, False])
    machine = SimpleNamespace(should_run_forward_backward=lambda data: next(runs))
    monkeypatch.setattr(workarounds, "get_rerun_state_machine", lambda: machine)
    monkeypatch.setattr(workarounds, "get_num_microbatches", lambda: 3)
    readers = [iter(range(10)) for _ in range(iterators)]
    data = [readers[0], None, readers[1]] if iterators == 2 else readers[0] if iterators else None
    workarounds.pass_over(lambda data: pytest.fail("stock reads one iterator alone"))(data)
    assert [next(reader) for reader in readers] == [3] * iterators


STEPS = (4, 4), (4, 2), (2, 4), (5, 4), (3, 2)
"""The microbatches of both replicas.  With 2, v-zb completes the chunks of rank 1 in another order."""

OURS = ("v-zb", 2, True), ("v-zb", 2, False), ("zb-h1", 1, False)
"""Schedules, their chunks, and whether a chunk is reduced as a whole (Megatron's align_grad_reduce)."""


def trained(name: str | None, chunks: int, is_aligned: bool) -> own_loop.Record:
    """Train this rank of one of two pipelines of two ranks, which reduce gradients during the step."""
    replica = parallel_state.get_data_parallel_rank()
    with megatron_pp_ext.installed(name, ranks=2, microbatches=4) if name else nullcontext():
        model = own_loop.build(chunks, overlaps=True)
    config, several = model[0].config, chunks > 1
    for setting, method in (("no_sync_func", "no_sync"), ("grad_sync_func", "start_grad_sync")):
        functions = [getattr(chunk, method) for chunk in model]
        setattr(config, setting, functions if several else functions[0])
    if not is_aligned:
        config.grad_sync_func = None
    return own_loop.train(model, tuple(counts[replica] for counts in STEPS), seed=7 + replica)


def on_rank(rank: int) -> list[own_loop.Record]:
    """Return what ``rank`` found under stock's schedule and under ours."""
    own_loop.start()
    return [trained(*job) for job in ((None, 1, True), *OURS)]


def test_replicas_with_other_numbers_train_as_under_stock() -> None:
    stock, *others = zip(*run_ranks(on_rank, 4), strict=True)
    for ours in others:
        for pipeline in (0, 1):
            own_loop.assert_same(ours[pipeline::2], stock[pipeline::2])
