"""Estimates of pipelines that never flush: with replicated stages, and with one rank a stage."""

from dataclasses import replace

import pytest

from megatron_pp_ext.costs.system import Link, System
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.job.sizes import fewest_ranks
from megatron_pp_ext.pipedream.partition.cost_formulas import StageLoad, in_flight, paper
from megatron_pp_ext.planner.step.estimate import Estimate, Unflushed, estimate_request
from megatron_pp_ext.planner.step.model_description import asked_of, describe
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule.families.pipedream import Replicas
from megatron_pp_ext.schedule.messages import SENDS_AHEAD
from megatron_pp_ext.schedule.placement import linear

RATE, COPY = 1e14, 2e12
NODE, NETWORK = Link(1e11, 1e-6), Link(1e10, 1e-5)
MACHINE = System("test", 8, 80e9, {"bf16": [[64, 64, 64, RATE]]}, COPY, NODE, NETWORK)
MODEL = {
    "num_layers": 12, "hidden_size": 1024, "num_attention_heads": 8, "seq_length": 512, "vocab_size": 32000,
    "micro_batch_size": 1, "bf16": True, "untie_embeddings_and_output_weights": True,
    "pipeline_schedule": "pipedream",
}  # fmt: skip


def arguments(replicas: str, rounds: int = 1, **changed):
    """The model in stages with these replicas; an update after ``rounds`` turns of all replicas."""
    counts = Replicas(tuple(map(int, replicas.split("-"))))
    interval = rounds * counts.full_round
    return describe(
        {
            **MODEL, "pipeline_model_parallel_size": counts.stages, "pipeline_replicas": replicas,
            "pipeline_update_interval": interval, "global_batch_size": interval, **changed,
        }
    )  # fmt: skip


def estimated(job, machine: System = MACHINE) -> Estimate:
    return estimate_request(job, machine, for_world(asked_of(job), fewest_ranks(job)))


def unflushed(job, machine: System = MACHINE) -> Unflushed:
    request = for_world(asked_of(job), fewest_ranks(job))
    work = Workload(job, machine, request.placement, 1)
    return Unflushed(work, request.updates)


def versions(job) -> list[int]:
    return [round(rank.versions / rank.weights) for rank in estimated(job).ranks]


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("changed", [{}, {"pipeline_vertical_sync": True}])
def test_one_replica_each_is_the_straight_pipeline(stages: int, changed: dict) -> None:
    for rounds in (1, 4):
        straight = estimated(arguments("-".join("1" * stages), rounds, pipeline_replicas=None, **changed))
        assert estimated(arguments("-".join("1" * stages), rounds, **changed)) == straight


def test_every_replica_has_its_stage_whole() -> None:
    """Weights, gradients, optimizer state, and activations of as many microbatches as it has in flight."""
    job = arguments("2-3-1")
    made, ranks = unflushed(job), estimated(job).ranks
    assert len(ranks) == 6
    for rank, stage in enumerate((0, 0, 1, 1, 1, 2)):
        part = made.work.parts[stage]
        assert ranks[rank].weights == 2 * part.parameters
        assert ranks[rank].gradients == 4 * part.parameters
        assert ranks[rank].optimizer == 12 * part.parameters
        assert ranks[rank].loss == made.work.loss_bytes(2 if stage == 2 else 0)
        depth = in_flight((2, 3, 1))[stage]
        assert depth == (3, 2, 1)[stage]
        assert ranks[rank].activations == pytest.approx(depth * part.after_forward, rel=0.05)


@pytest.mark.parametrize("replicas", ["1-2", "1-1-2"])
def test_all_replicas_of_the_last_stage_compute_the_loss(replicas: str) -> None:
    *others, first, second = (rank.loss for rank in estimated(arguments(replicas)).ranks)
    assert first == second > 0 == sum(others)


def test_a_replica_keeps_versions_by_its_own_warm_up() -> None:
    """Of M ranks, (M - 1 - those before) / r forwards are ahead of a backward, in as many updates."""
    assert versions(arguments("3-1")) == [1, 1, 1, 0]
    assert versions(arguments("2-1-1")) == [1, 1, 1, 0]
    assert versions(arguments("1-2-1")) == [2, 1, 1, 0]
    assert versions(arguments("1-3")) == [1, 0, 0, 0]
    assert versions(arguments("1-1-4", pipeline_vertical_sync=True)) == [2] * 6
    assert versions(arguments("3-1", pipeline_vertical_sync=True)) == [1, 1, 1, 1]
    assert versions(arguments("3-1", 2, pipeline_schedule="pipedream-2bw")) == [1, 1, 1, 1]


def test_messages_go_to_whichever_replica_has_the_turn() -> None:
    """A rank holds what waits for it, and as many sent messages as may be under way, to all its receivers."""
    job = arguments("1-3")
    size = unflushed(job).work.message
    first, *others = (rank.messages / size - SENDS_AHEAD - 1 for rank in estimated(job).ranks)
    assert first >= 1
    assert len(set(others)) == 1


def ring(size: float, ranks: int, link: Link = NODE) -> float:
    """The seconds of an all-reduce around a ring."""
    return 2 * (ranks - 1) * (link.latency_seconds + size / ranks / link.bytes_per_second)


def test_replicas_of_a_stage_add_up_its_gradients_alone() -> None:
    work = unflushed(arguments("3-1")).work
    first, last = work.waits
    assert first.reduction == pytest.approx(ring(4 * work.parts[0].parameters, 3))
    assert last.reduction == 0
    assert first.update == pytest.approx((38 + 4) * work.parts[0].parameters / COPY)
    # With tensor parallelism, replicas are as far apart as it is wide.
    wide = unflushed(arguments("3-1", tensor_model_parallel_size=4)).work
    between = (Link(NETWORK.bytes_per_second * 2, NETWORK.latency_seconds), wide.waits[0].reduction)
    size = 4 * wide.parts[0].parameters / 3 / between[0].bytes_per_second
    assert between[1] == pytest.approx(4 * size + 2 * NETWORK.latency_seconds + 2 * NODE.latency_seconds)


def test_stages_of_one_model_may_have_equal_layers_and_other_numbers_of_replicas() -> None:
    work = unflushed(arguments("1-2-3-1")).work
    assert work.parts[1] is work.parts[2]
    second, third = work.waits[1:3]
    size = 4 * work.parts[1].parameters
    assert (second.reduction, third.reduction) == pytest.approx((ring(size, 2), ring(size, 3)))


@pytest.mark.parametrize(
    ("replicas", "rounds", "layout"),
    [("3-1", 1, "Et*9|t*3L"), ("2-1", 1, "Et*8|t*4L"), ("3-3", 1, None), ("3-3", 3, None)],
)
def test_where_nobody_waits_a_step_is_what_the_busiest_replica_does(replicas, rounds, layout) -> None:
    """K / r forwards and backwards, the all-reduce, and the update."""
    job = arguments(replicas, rounds, pipeline_model_parallel_layout=layout)
    made = unflushed(job)
    expected = [
        job.batch.global_batch_size
        / count
        * (part.forward_seconds + part.backward_seconds - part.overlapped_in_whole)
        + ring(4 * part.parameters, count)
        + (38 + 4) * part.parameters / COPY
        for count, part in zip(made.updates.replicas.counts, made.work.parts, strict=True)
    ]
    assert made.busiest == (expected.index(max(expected)), pytest.approx(max(expected)))
    found = estimated(job)
    assert found.step_seconds == pytest.approx(max(expected))
    each = max(expected) / job.batch.global_batch_size
    stage = expected.index(max(expected))
    assert found.note.startswith(
        f"a microbatch every {each:.4g} s, of which the busiest stage, {stage}, needs"
    )
    assert found.pipeline_seconds < found.step_seconds


def test_without_gradients_to_add_the_busiest_stage_is_the_partitioner_s() -> None:
    """PipeDream's own recurrence has T / r for a stage whose messages and gradients take no time."""
    made = unflushed(arguments("1-2-1", 2, pipeline_model_parallel_layout="Et*2|t*8|ttL"))
    loads = (
        StageLoad(seconds / (made.updates.interval // count), 0, 0, 0, count, 1e30, 1, is_first=True)
        for seconds, count in zip(made.working, made.updates.replicas.counts, strict=True)
    )
    assert max(map(paper, loads)) == pytest.approx(max(made.working) / made.updates.interval)


def test_what_the_bubble_and_the_rates_count() -> None:
    """All ranks' time is that of the machine, and a step has the tokens of K microbatches."""
    job = arguments("2-1-1", 2)
    made, found = unflushed(job), estimated(job)
    busy = sum(seconds * count for seconds, count in zip(made.working, (2, 1, 1), strict=True))
    assert found.bubble == pytest.approx(1 - busy / (4 * found.pipeline_seconds))
    assert found.tokens_per_second == pytest.approx(4 * 512 / found.step_seconds)
    alone = describe({**MODEL, "pipeline_schedule": None, "global_batch_size": 4})
    one = estimated(alone)
    ratio = found.utilisation / one.utilisation
    assert ratio == pytest.approx(one.step_seconds / found.step_seconds / 4, rel=1e-4)


def test_messages_cross_the_network_where_the_ranks_of_all_stages_do_not_fit_a_node() -> None:
    for gpus, link in ((4, NODE), (3, NETWORK)):
        machine = replace(MACHINE, gpus_per_node=gpus)
        work = unflushed(arguments("2-1-1"), machine).work
        assert work.hop == pytest.approx(link.seconds(work.message))


def test_stages_that_may_wait_do_so_at_every_update() -> None:
    """Then no stage is ahead of another: each update fills the pipeline and lets it drain."""
    apart, together = (
        estimated(arguments("1-1-1-1", 4, pipeline_replicas=None, pipeline_allow_waits=waits))
        for waits in (False, True)
    )
    assert together.pipeline_seconds > 1.2 * apart.pipeline_seconds
    assert together.ranks == apart.ranks


def test_a_number_is_no_list_of_replicas() -> None:
    """A model's file may have one, where Megatron's parser would not let it through."""
    with pytest.raises(ValueError, match="--pipeline-replicas 31, but it must be a text"):
        arguments("3-1", pipeline_replicas=31)


def test_workloads_without_replicas_have_as_many_copies_of_every_stage() -> None:
    job = describe({**MODEL, "pipeline_schedule": "1f1b", "pipeline_model_parallel_size": 2})
    work = Workload(job, MACHINE, linear(2), 3)
    assert (work.gpus, work.sharing.dense) == (6, 3)
    assert [wait.reduction > 0 for wait in work.waits] == [True, True]
