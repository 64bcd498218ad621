"""A step whose ranks share the vocabulary: its time, and what every rank keeps."""

from dataclasses import replace

import pytest

from megatron_pp_ext.compiler.limits import InfeasibleLimit
from megatron_pp_ext.costs import system
from megatron_pp_ext.costs.model_parts import model_parts
from megatron_pp_ext.costs.system_kernels import SystemKernelSeconds
from megatron_pp_ext.features.vocabulary.share import share
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner.step.estimate import estimate_request
from megatron_pp_ext.planner.step.model_description import asked_of, describe
from megatron_pp_ext.planner.step.programs import Prepared, placement_of, program
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.costs import Costs, HeadCosts, StageCosts
from megatron_pp_ext.schedule.messages import EMBEDS_AHEAD
from megatron_pp_ext.schedule.simulate import simulate

# Kernels of these small layers are shorter than the time to start them, which would hide what is compared.
H100 = replace(system.read("h100"), kernel_seconds=0.0)
S, H, V, P = 512, 1024, 32000, 4
HIDDEN = 2 * S * H
MODEL = {
    "num_layers": 8, "hidden_size": H, "num_attention_heads": 8, "seq_length": S, "micro_batch_size": 1,
    "vocab_size": V, "max_position_embeddings": S, "bf16": True, "make_vocab_size_divisible_by": 1,
    "hidden_dropout": 0.0, "pipeline_model_parallel_size": P, "global_batch_size": 8,
}  # fmt: skip
UNTIED = {"untie_embeddings_and_output_weights": True}
SEQUENCE_PARALLEL = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def arguments(name="1f1b", vocabulary="shared", **changed):
    return describe({**MODEL, "pipeline_schedule": name, "pipeline_vocabulary": vocabulary, **changed})


def estimated(name="1f1b", vocabulary="shared", **changed):
    job = arguments(name, vocabulary, **changed)
    tensor = job.parallel.tensor_model_parallel_size
    return estimate_request(job, H100, for_world(asked_of(job), P * tensor))


def work(name="1f1b", shares=True, **changed):
    chunks = catalog.entry(name).chunks
    return Workload(arguments(name, None, **changed), H100, placement_of(name, P, chunks, shares), 1)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "v-half"])
@pytest.mark.parametrize("changed", [{}, UNTIED, SEQUENCE_PARALLEL], ids=["tied", "untied", "tensor"])
def test_all_ranks_together_have_the_model_once(name, changed):
    """Without sharing, a tied weight is on two ranks, unless a V puts both ends on one."""
    tensor = changed.get("tensor_model_parallel_size", 1)
    table = V * H / tensor
    rows = table * (2 if changed == UNTIED else 1)
    job = arguments(name, None, **changed)
    made = model_parts(job, vocabulary=V)
    positions, norm = S * H, 2 * H
    whole = sum(layer.parameters for layer in made.layers) + rows + positions + norm
    shared = work(name, **changed)
    assert sum(part.parameters for part in shared.by_rank) == pytest.approx(whole)
    without = replace(shared.placement, splits_head=False)
    separate = Workload(job, H100, without, 1).by_rank
    first, last = shared.placement.rank_of(0), shared.head_rank
    for rank, (part, plain) in enumerate(zip(shared.by_rank, separate, strict=True)):
        ends = [table] * (rank == first) + [table] * (rank == last)
        assert part.parameters == pytest.approx(plain.parameters - sum(ends) + rows / P)


@pytest.mark.parametrize("changed", [{}, UNTIED, SEQUENCE_PARALLEL], ids=["tied", "untied", "tensor"])
def test_weights_optimizer_and_the_loss_are_on_all_ranks(changed):
    shared, logits = work(**changed), S * V / changed.get("tensor_model_parallel_size", 1)
    for part, found in zip(shared.by_rank, estimated(**changed).ranks, strict=True):
        assert found.weights == 2 * part.parameters
        assert found.gradients == 4 * part.parameters
        assert found.optimizer == 12 * part.parameters
        assert found.loss == (4 + 2) * logits / P
    plain = [rank.loss for rank in estimated(vocabulary=None, **changed).ranks]
    gathered = HIDDEN if "sequence_parallel" in changed else 0
    assert plain == [0, 0, 0, 2 * logits + gathered + shared.model.output_buffer]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "v-half", "v-zb"])
def test_the_step_is_the_simulation_of_costs_put_together_by_hand(name):
    """Every rank does a fourth of the output layer; a stage does what it does without, less its end."""
    job = arguments(name)
    shared = work(name)
    plain, separate = (work(name, shares=False), model_parts(job, SystemKernelSeconds(H100, job), V))
    first, *inner, last = plain.costs.stages
    output = separate.output
    less = (output.forward_seconds, output.input_gradient_seconds, output.weight_gradient_seconds)
    times = (last.forward - less[0], last.input_gradient - less[1], last.weight_gradient - less[2])
    ends = StageCosts(*times, *_kept(shared.parts[-1]))
    exponentials = 2 * S * V / P
    hop = plain.costs.hop
    vocabulary = HeadCosts(
        (less[0] + less[1]) / P, less[2] / P, exponentials + 2 * HIDDEN, hidden=hop, sums=2 * hop
    )
    by_hand = Costs((first, *inner, ends), hop, HIDDEN, vocabulary)
    chunks = catalog.entry(name).chunks
    schedule = share(lambda count: catalog.build(name, P, count, chunks), 8)
    timeline = simulate(schedule, by_hand)
    found = estimated(name)
    assert found.pipeline_seconds == pytest.approx(timeline.makespan)
    assert found.bubble == pytest.approx(timeline.bubble)
    assert [rank.activations for rank in found.ranks] == pytest.approx(timeline.peak_activations)
    buffers = [count * HIDDEN + (EMBEDS_AHEAD + 2) * HIDDEN for count in timeline.peak_messages]
    assert [rank.messages for rank in found.ranks] == buffers


def _kept(part):
    costs = part.costs()
    return costs.activation, costs.released_by_input_gradient


def test_ranks_exchange_the_hidden_states_of_all_tokens():
    """Sequence parallelism leaves half of the tokens to each of two ranks, but not in an exchange.

    A tied weight that exists once is not summed.
    """
    plain, cut, separate = work(), work(**SEQUENCE_PARALLEL), work(shares=False)
    assert plain.exchanged_bytes == cut.exchanged_bytes == (EMBEDS_AHEAD + 2) * HIDDEN
    kept, halved = (made.costs.head.activation for made in (plain, cut))
    assert kept - halved == (2 * S * V / P) / 2
    assert separate.exchanged_bytes == plain.tied_seconds == 0 < separate.tied_seconds


def test_microbatches_between_s_and_t_add_to_the_peak():
    """A rank keeps 7 bytes of each; with stages that keep nothing, these are all."""
    schedule = share(lambda count: catalog.build("1f1b", P, count), 8)
    costs = Costs((StageCosts(1, 1, 1, 0.0),) * P, head=HeadCosts(1, 1, 7.0))
    nothing = [work().parts[1].times(0)] * P
    assert Prepared(schedule).in_flight.peaks(nothing, 7.0) == simulate(schedule, costs).peak_activations
    assert Prepared(schedule).in_flight.peaks(nothing) == (0.0,) * P


def test_auto_shares_a_large_vocabulary_and_says_what_that_saves():
    separate, shared, auto = (estimated(vocabulary=which) for which in (None, "shared", "auto"))
    saved = 1 - shared.pipeline_seconds / separate.pipeline_seconds
    assert saved > 0.1
    assert auto == replace(shared, note=f"vocabulary shared: steps are {saved:.1%} shorter by the estimate")


def test_auto_does_not_share_a_few_rows_and_says_what_that_would_cost():
    separate, shared, auto = (estimated(vocabulary=which, vocab_size=8) for which in (None, "shared", "auto"))
    more = shared.pipeline_seconds / separate.pipeline_seconds - 1
    told = f"vocabulary not shared: that would change a step by {more:+.1%}"
    assert auto == replace(separate, note=told)


def test_auto_shares_nothing_where_other_flags_rule_it_out():
    job = arguments(vocabulary="auto", mtp_num_layers=1)
    assert for_world(asked_of(job), P).splits_head is False
    deep = estimated(vocabulary="auto", mtp_num_layers=1)
    assert deep == estimated(vocabulary=None, mtp_num_layers=1)


def test_flex_counts_the_parts_of_the_vocabulary_in_its_limit(short_searches):
    sizes = {"pipeline_model_parallel_size": 2, "global_batch_size": 4, "pipeline_memory_limit": 300e6}
    separate, shared = (_flex(which, **sizes) for which in (None, "shared"))
    beside = (EMBEDS_AHEAD + 2) * HIDDEN
    assert all(rank.activations + rank.messages - beside <= 300e6 for rank in shared.ranks)
    assert shared.pipeline_seconds < separate.pipeline_seconds


def test_auto_does_not_share_what_has_no_room(short_searches):
    """A microbatch and its messages fit, but nothing beside them; far below that, sharing is refused too."""
    sizes = {"pipeline_model_parallel_size": 2, "global_batch_size": 4, "vocab_size": 8}
    for limit in (75e6, 1e6):
        with pytest.raises(InfeasibleLimit, match="no room for the parts of a shared vocabulary"):
            _flex("shared", **sizes, pipeline_memory_limit=limit)
    # What is left for the stages is below nothing where the parts alone exceed the limit.
    with pytest.raises(InfeasibleLimit, match="no room for the parts of a shared vocabulary"):
        _flex("shared", **{**sizes, "vocab_size": 256000}, pipeline_memory_limit=100e6)
    auto, separate = (_flex(which, **sizes, pipeline_memory_limit=75e6) for which in ("auto", None))
    assert auto == replace(separate, note="vocabulary not shared: the memory limit has no room for its parts")


def _flex(vocabulary, **sizes):
    job = arguments("flex", vocabulary, **sizes)
    return estimate_request(job, H100, for_world(asked_of(job), 2))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"pipeline_model_parallel_size": 1}, "needs a pipeline of 2 ranks or more"),
        ({"pipeline_schedule": None}, "has no effect under Megatron's own schedules"),
        ({"mtp_num_layers": 1}, "multi-token prediction has logits of its own"),
        ({"pipeline_schedule": "csv:a.csv"}, "does not support --pipeline-schedule csv:a.csv"),
        (
            {"pipeline_schedule": "pipedream-2bw", "untie_embeddings_and_output_weights": True},
            "does not support --pipeline-schedule pipedream-2bw",
        ),
    ],
)
def test_refusals_are_one_line(changed, message):
    job = describe({**MODEL, "pipeline_schedule": "1f1b", "pipeline_vocabulary": "shared", **changed})
    with pytest.raises(ValueError, match=r"--pipeline-vocabulary shared") as raised:
        for_world(asked_of(job), job.parallel.pipeline_model_parallel_size)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_program_that_shares_is_another_one():
    shared, plain = (program("1f1b", P, 8, 1, shares) for shares in (True, False))
    assert shared.timer.schedule.placement == work().placement
    assert len(shared.timer.schedule.orders[0]) == len(plain.timer.schedule.orders[0]) + 2 * 8
