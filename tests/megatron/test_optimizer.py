"""Updates that wait for one stage alone, and optimizer state: its moments, and what is saved rank by rank."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_pp_ext import cpu
from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.costs.model_parts import model_parts
from megatron_pp_ext.costs.optimizers import moment_bytes
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.megatron import requested
from megatron_pp_ext.megatron.core import optimizer
from megatron_pp_ext.megatron.trainer import reports
from megatron_pp_ext.schedule.families.pipedream import Replicas, Updates, WeightVersion
from tests.support.flags import arguments
from tests.support.own_loop_checkpoints import BY_WEIGHT, FIRST, PAIRS, SHARED_KEYS, exchanged
from tests.support.ranks import run_ranks
from tests.support.tiers import first
from tests.support.training import train


@pytest.mark.parametrize(
    ("updates", "waits"),
    [
        (None, True),
        (Updates(1, WeightVersion.LATEST, True, Replicas.straight(2)), True),
        (Updates(1, WeightVersion.LATEST, False, Replicas.straight(2)), False),
    ],
)
def test_a_stage_keeps_its_own_value(updates: Updates | None, waits: bool) -> None:
    across = reports.keep_within_stage(lambda value, group=None: f"{value} of all")

    def norm(grads_for_norm, norm_type=2, grad_stats_parallel_group=None):
        return grad_stats_parallel_group

    within = optimizer.sum_within_stage(norm)
    requested.activate(requested.Pipeline(replace(named("pipedream", 2, 1), updates=updates)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "_part_of_stage", lambda group: f"this stage's of {group}")
        try:
            assert across("norm") == ("norm of all" if waits else "norm")
            assert within([], grad_stats_parallel_group="all") == ("all" if waits else "this stage's of all")
            assert within([], 2, "all") == ("all" if waits else "this stage's of all")
            # Without a group stock sums over all ranks.
            assert within([]) == (None if waits else "this stage's of None")
        finally:
            requested.activate(None)


def on_rank(rank: int, folder: str) -> dict:
    from tests.support import own_loop

    cpu.fork_checkpoint_writers(["--save", folder])
    own_loop.start()
    return exchanged(folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What both ranks found; see ``own_loop_checkpoints``."""
    return run_ranks(on_rank, 2, str(tmp_path_factory.mktemp("checkpoints")))


@pytest.mark.parametrize(("form", "name", "other"), PAIRS)
def test_it_loads_under_the_placement_that_it_was_saved_under(found, form, name, other) -> None:
    """State that goes by weight loads anywhere."""
    v, stock = "v placement with 2 chunk(s) on each of 2 ranks", "Megatron's own placement"
    last = f"{v} and both ends of the model on the last one"
    before, now = (
        stock if not one.startswith("v-") else v if one.endswith(FIRST) else last for one in (name, other)
    )
    for rank in found:
        line = rank[form, name, other]
        if form == BY_WEIGHT or before == now:
            assert line == ("loaded" if form == BY_WEIGHT else "same")
        else:
            refusal = f"rank by rank, for {before}, and this model has {now}; save with dist_ckpt_optim_fully"
            assert refusal in line and "\n" not in line


def test_a_process_without_this_package_finds_none_of_a_v(found) -> None:
    assert [rank[SHARED_KEYS] for rank in found] == [set(), set()]


FLAGS = "--untie-embeddings-and-output-weights --optimizer"


@pytest.mark.parametrize("optimizer", first(1, ["muon", "sgd", "muon --muon-scalar-optimizer lion"]))
def test_moments_are_those_that_are_counted(optimizer: str, tmp_path: Path) -> None:
    flags = f"{FLAGS} {optimizer}"
    held = tmp_path / "held"

    def write(chunks: list[torch.nn.Module]) -> None:
        sizes = (
            value.nbytes
            for one in gc.get_objects()
            if isinstance(one, torch.optim.Optimizer)
            for state in one.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.dim()
        )
        held.write_text(str(sum(sizes)))

    train(1, [*flags.split(), "--train-iters", "2"], disturb=write)
    job = Job.of(arguments(flags))
    model = model_parts(job)
    whole = sum(model.layers, model.table + model.positions + model.last_norm + model.output)
    matrices = whole.matrices.parameters if whole.matrices else 0.0
    moments = moment_bytes(job.memory, matrices / whole.parameters) * whole.parameters
    assert int(held.read_text()) == pytest.approx(moments)
