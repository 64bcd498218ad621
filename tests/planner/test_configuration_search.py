"""The search finds what trying everything finds, and says what is wrong where it finds nothing."""

from dataclasses import replace
from itertools import product

import pytest

from megatron_pp_ext.compiler.limits import requested_budget
from megatron_pp_ext.costs import system
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.features.pairs.order import Pairs
from megatron_pp_ext.features.units.options import Slices
from megatron_pp_ext.job import options
from megatron_pp_ext.job.pipeline import for_world, spelled
from megatron_pp_ext.planner.search.best_first import Search
from megatron_pp_ext.planner.search.candidate import Candidate, Recompute, fixed_arguments, strip
from megatron_pp_ext.planner.search.compiled import Compiler
from megatron_pp_ext.planner.search.configurations import Space, record
from megatron_pp_ext.planner.search.lower_bounds import bounds, least_memory, least_memory_sharing
from megatron_pp_ext.planner.search.replays import CandidateCuts, Evaluated, Workloads, order_of
from megatron_pp_ext.planner.search.result import ALIKE, Compiles, why
from megatron_pp_ext.planner.step.estimate import StepModel, estimate_request
from megatron_pp_ext.planner.step.model_description import asked_of, describe
from megatron_pp_ext.planner.step.programs import program
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule import catalog
from tests.support import rounding

MODEL = {
    "num_layers": 8, "hidden_size": 4096, "num_attention_heads": 32, "seq_length": 2048, "vocab_size": 32000,
    "bf16": True,
}  # fmt: skip
A100 = system.read("a100-80g")
FEW = ("1f1b", "zb-h1", "interleaved", "v-half", "v-zb")


def space(gpus=4, batch=8, schedules=FEW, fixed=(), **changed):
    job = describe({**MODEL, **changed})
    job = job.changed(**options.permitted(asked_of(job)))
    return Space(job, gpus, 8, batch, schedules, fixed)


def everything(where):
    for cut in where.cuts():
        for chunks, names in where.orders(cut):
            for recompute in where.recomputes(cut, chunks):
                for sized in where.refined(replace(cut, chunks=chunks, recompute=recompute)):
                    for name, shares in product(names, where.sharing(cut)):
                        yield replace(sized, schedule=name, splits_head=shares)


def estimated(candidate, where):
    job = candidate.described(where.job)
    work = Workload(job, A100, candidate.placement, candidate.data)
    order = order_of(candidate, work=work)
    return work, StepModel(work, order, candidate.schedule, candidate.microbatches).estimate()


def searched_as_exhaustively(where, limit, top):
    """The result of a search, whose best are those of all candidates, with one schedule for equal sizes.

    Behind each are all schedules that are nearly as fast, but for the last, where some may be left out.
    """
    found = Search(where, A100, limit, top=top).run()
    candidates = list(everything(where))
    assert len(candidates) == found.legal
    steps = {}
    for candidate in candidates:
        one = estimated(candidate, where)[1]
        if one.fullest.total <= limit:
            steps.setdefault(candidate.apart_from_schedule, []).append(one.step_seconds)
    expected = sorted(map(sorted, steps.values()))[:top]
    assert [one.estimate.step_seconds for one in found.best] == pytest.approx([own[0] for own in expected])
    for one, (least, *others) in list(zip(found.best, expected, strict=True))[:-1]:
        near = [step for step in others if step <= least * (1 + ALIKE)]
        assert [other.estimate.step_seconds for other in found.alike[one.candidate]] == pytest.approx(near)
    return found


@pytest.mark.parametrize("limit", [30e9, 12e9])
def test_the_best_are_those_of_an_exhaustive_search(limit):
    where = space(fixed=("context_parallel_size",))
    found = searched_as_exhaustively(where, limit, top=4)
    assert found.replayed < found.legal / 2
    places = [(row.estimate.fullest.total, row.estimate.step_seconds) for row in found.frontier]
    assert places == sorted(places) and [step for _, step in places] == sorted(
        (step for _, step in places), reverse=True
    )
    for row in (*found.best, *found.for_less_memory):
        memory, step = row.estimate.fullest.total, row.estimate.step_seconds
        assert min(least for bytes_, least in places if bytes_ <= memory) <= step


def test_schedules_that_are_nearly_as_fast_stand_behind_the_fastest():
    sizes = {"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 1}
    found = searched_as_exhaustively(space(batch=48, fixed=tuple(sizes), **sizes), 60e9, top=4)
    assert all(one.candidate.pipeline == 4 for one in found.best)
    assert any(found.alike.values())


IN_PAIRS = {
    "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 4096, "add_bias_linear": False,
    "moe_token_dispatcher_type": "alltoall", "overlap_moe_expert_parallel_comm": True,
}  # fmt: skip


def test_pairs_are_searched_as_everything_else():
    """With Megatron's flag every candidate has experts on several ranks and runs in pairs, one rank too."""
    where = space(gpus=8, batch=16, schedules=("1f1b", "interleaved", "dualpipe-v"),
                  fixed=("context_parallel_size",), **IN_PAIRS)  # fmt: skip
    found = searched_as_exhaustively(where, 60e9, top=4)
    assert {one.candidate.options for one in found.best} == {(Pairs(),)}
    recorded = record(found.best[0].candidate)
    assert recorded["is_paired"] and "options" not in recorded
    rounded = rounding.relative(eps=rounding.FLOAT64)
    hidden, pipelines = set(), set()
    for candidate in everything(where):
        assert candidate.expert > 1
        pipelines.add(candidate.pipeline)
        work, step = estimated(candidate, where)
        hidden.add(work.costs.pair < 1)
        bound = bounds(work, candidate.microbatches)[catalog.abilities(candidate.schedule).splits_backward]
        assert step.step_seconds >= bound * (1 - rounded)
    assert hidden == {True}
    assert pipelines == {1, 2, 4}


@pytest.mark.parametrize("limit", [60e9, 20e9])
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"mtp_num_layers": 1},
        {"vocab_size": 256000},
        IN_PAIRS | {"moe_layer_freq": [0] + 7 * [1], "add_bias_linear": False},
    ],
)
def test_the_best_layout_is_no_slower_than_any_even_candidate(changed, limit):
    """No step of its own space is shorter than the best, whatever its bounds leave out."""
    even = space(batch=8, schedules=("1f1b", "interleaved"), fixed=("context_parallel_size",), **changed)
    steps = [one.step_seconds for _, one in (estimated(each, even) for each in everything(even))
             if one.fullest.total <= limit]  # fmt: skip
    best = Search(replace(even, is_uneven=True), A100, limit, top=1).run().best[0]
    assert best.estimate.fullest.total <= limit
    assert best.estimate.step_seconds <= min(steps) * (1 + rounding.relative(eps=rounding.FLOAT64))


def test_pairs_may_recompute_the_dense_layers_before_experts():
    """Megatron computes no experts alone again there, and no dense layer with biases."""
    own = {"moe_layer_freq": [0] + 7 * [1]}
    for changed, offered in ((own, True), (own | {"add_bias_linear": True}, False), ({}, False)):
        where = space(gpus=8, batch=16, **(IN_PAIRS | {"add_bias_linear": False} | changed))
        names = [one.name for one in where.recomputes(next(where.cuts()), 1)]
        some = ["none", "recompute-act", "recompute-mlp"][: 2 + offered]
        assert names == [*some, "recompute-half", "recompute-full"]


@pytest.mark.parametrize(
    ("changed", "modules"),
    [
        ({}, ("layernorm",)),
        ({"moe_grouped_gemm": True, "moe_layer_freq": [0] + 7 * [1]}, ("moe_act", "layernorm", "mlp")),
        ({"fp8": "hybrid", "moe_grouped_gemm": True}, None),
        ({"fp8": "hybrid", "moe_grouped_gemm": True, "fp8_recipe": "tensorwise"}, ("moe_act", "layernorm")),
        ({"multi_latent_attention": True, "kv_lora_rank": 64}, ("layernorm", "mla_up_proj")),
        ({"num_experts": None}, None),
    ],
)
def test_modules_of_experts_that_take_little_are_computed_again(changed, modules):
    """Delayed scales of FP8 allow neither activations nor norms, and dense models have no such modules."""
    where = space(**{"num_experts": 8, "add_bias_linear": False, **changed})
    ways = where.recomputes(next(where.cuts()), 1)
    offered = [way.modules for way in ways if way.name == "recompute-act"]
    assert offered == ([] if modules is None else [modules])


@pytest.mark.parametrize("name", catalog.NAMES)
def test_no_step_is_below_its_bound(name):
    rounded = rounding.relative(eps=rounding.FLOAT64)
    for batch in (2, 16):
        where = space(gpus=4, batch=batch, schedules=(name,), fixed=("pipeline_model_parallel_size",),
                      pipeline_model_parallel_size=4)  # fmt: skip
        for candidate in everything(where):
            work, found = estimated(candidate, where)
            bound = bounds(work, candidate.microbatches)[catalog.abilities(name).splits_backward]
            assert found.step_seconds >= bound * (1 - rounded)


def test_flex_fits_and_is_no_slower_than_a_family_of_its_layout(short_searches):
    where = space(gpus=2, batch=6, schedules=("v-half",), fixed=("pipeline_model_parallel_size",),
                  pipeline_model_parallel_size=2)  # fmt: skip
    named, compiled, only = (Search(where, A100, 60e9, compiles=which).run() for which in Compiles)
    assert {one.candidate.schedule for one in only.best} == {"flex"}
    assert compiled.best[0].estimate.step_seconds <= named.best[0].estimate.step_seconds
    flex = [one for one in compiled.named if one.candidate.schedule == "flex"]
    assert flex
    assert all(one.estimate.fullest.total <= 60e9 for one in flex)


def test_a_limit_of_the_user_is_kept(short_searches):
    about = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "flex"}

    def search(limit):
        where = space(gpus=2, batch=6, fixed=tuple(about), **about, pipeline_memory_limit=limit)
        return Search(where, A100, 60e9, compiles=Compiles.ONLY).run().best[0]

    free, fraction = search(None), search(0.75)
    chosen = fraction.candidate
    work = Workload(chosen.described(space().job), A100, chosen.placement, chosen.data)
    allowed, _ = requested_budget(0.75, 2, chosen.microbatches, work.costs).ranks
    assert max(rank.activations for rank in fraction.estimate.ranks) <= allowed < _least(free)
    assert "--pipeline-memory-limit 0.75" in " ".join(chosen.flags())
    amount = search(allowed)
    assert max(rank.activations + rank.messages for rank in amount.estimate.ranks) <= allowed
    assert amount.candidate.limit == allowed
    with pytest.raises(ValueError, match=r"flex finds nothing: memory limit .* raise the limit to at least"):
        search(0.6)


def _least(found):
    limit = found.candidate.limit
    return min(limit) if isinstance(limit, tuple) else limit


def test_ranks_have_limits_of_their_own_where_that_makes_a_shorter_step(short_searches, monkeypatch):
    """Where the rank with the vocabulary has few layers, the others have more memory left."""
    about = {"pipeline_model_parallel_size": 4, "vocab_size": 128000, "num_layers": 16}
    about |= {"micro_batch_size": 1, "recompute_granularity": None}
    where = space(gpus=4, batch=12, schedules=("v-half",), fixed=tuple(about), **about)
    where = replace(where, is_uneven=True)
    by_rank = Search(where, A100, 30e9, compiles=Compiles.ONLY).run().best[0]
    monkeypatch.setattr(Compiler, "_limits", lambda self, cut, left, whole: [min(left)])
    alike = Search(where, A100, 30e9, compiles=Compiles.ONLY).run().best[0]
    assert by_rank.estimate.step_seconds < 0.9 * alike.estimate.step_seconds
    limits = by_rank.candidate.limit
    assert len(set(limits)) > 1
    assert min(limits) == alike.candidate.limit
    peaks = [rank.activations + rank.messages for rank in by_rank.estimate.ranks]
    assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))
    assert max(peaks) > min(limits)
    assert by_rank.estimate.fullest.total <= 30e9
    job = by_rank.candidate.described(where.job)
    trained = estimate_request(job, A100, for_world(asked_of(job), 4))
    assert trained.fullest.total <= 30e9
    assert trained.step_seconds <= by_rank.estimate.step_seconds


def test_a_schedule_of_the_user_needs_a_pipeline():
    candidates = list(everything(space(schedules=("v-half",), fixed=("pipeline_schedule",))))
    assert {one.schedule for one in candidates} == {"v-half"}
    assert all(one.pipeline > 1 for one in candidates)


@pytest.mark.parametrize("fixed", [{"expert_model_parallel_size": 8}, {"expert_tensor_parallel_size": 2}])
def test_every_candidate_is_a_legal_plan(fixed):
    where = space(gpus=8, batch=16, schedules=("1f1b",), fixed=tuple(fixed), num_experts=8, **fixed)
    candidates = list(everything(where))
    assert candidates
    for candidate in candidates:
        plan = for_world(asked_of(candidate.described(where.job)), 8)
        assert (plan.data, plan.microbatches) == (candidate.data, candidate.microbatches)


def test_losers_say_where_they_lose():
    where = space(gpus=2, batch=8, fixed=("micro_batch_size",), micro_batch_size=1)
    fast, slow = Search(where, A100, 80e9, top=2).run().best
    recomputing = replace(fast.candidate, recompute=Recompute("recompute-full", "full", "uniform", 1))
    late = Evaluated(recomputing, estimated(recomputing, where)[1])
    assert why(fast, fast) == ""
    assert why(fast, late).startswith("work +")
    assert "(recompute-full)" in why(fast, late)
    idle = replace(fast.estimate, bubble=fast.estimate.bubble + 0.1)
    assert "bubble +" in why(fast, Evaluated(slow.candidate, idle))


def test_a_model_that_fits_nowhere_says_what_is_too_large():
    with pytest.raises(ValueError, match=r"fits nowhere: .* needs least, .* GB of it optimizer"):
        Search(space(), A100, 1e9).run()


def test_gpus_that_nothing_divides_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"--gpus 7 .*: nearest that work are 4 and 8"):
        Search(space(gpus=7, fixed=("pipeline_model_parallel_size",)), A100, 80e9).run()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_model_parallel_size": 3}, "--tensor-model-parallel-size 3 .* to 1, 2, 4 or 8$"),
        ({"context_parallel_size": 5}, "--context-parallel-size 5 .* to 1, 2, 4 or 8$"),
        ({"expert_model_parallel_size": 16}, "--expert-model-parallel-size 16 .* to 1, 2 or 4$"),
        ({"expert_tensor_parallel_size": 3}, "--expert-tensor-parallel-size 3 .* to 1, 2, 4 or 8$"),
        ({"micro_batch_size": 5}, "--micro-batch-size 5 .* to 1, 2, 4, 8 or 16$"),
        (
            {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 2, "micro_batch_size": 1},
            "on 8 GPUs with --tensor-model-parallel-size 8 and --pipeline-model-parallel-size 2 and .*: "
            "set --tensor-model-parallel-size to 1, 2 or 4, or --pipeline-model-parallel-size to 1$",
        ),
    ],
)
def test_the_flag_that_leaves_nothing_is_named_with_what_works(given, message):
    where = space(gpus=8, batch=16, fixed=tuple(given), num_experts=4, add_bias_linear=False, **given)
    with pytest.raises(ValueError, match=message):
        Search(where, A100, 80e9).run()


def test_nodes_are_used_whole():
    with pytest.raises(ValueError, match=r"--gpus 12 leaves a node of 8 .* nearest that work are 8 and 16"):
        Search(space(gpus=12), A100, 80e9).run()


def test_flags_of_the_user_stay_and_those_of_the_search_are_replaced():
    kept = ["--num-layers", "8", "--bf16"]
    words = [*kept, "--tensor-model-parallel-size", "4", "--sequence-parallel", "--recompute-activations"]
    assert fixed_arguments(words) == {"tensor_model_parallel_size", "recompute_granularity"}
    assert strip(words) == kept
    chosen = Candidate(2, 1, 1, 4, 1, 1, 16, Recompute("none"), "v-half", 2)
    flags = " ".join(chosen.flags())
    assert "--tensor-model-parallel-size 2 --sequence-parallel" in flags
    assert "--pipeline-schedule v-half --micro-batch-size 1 --global-batch-size 16" in flags
    assert "virtual" not in flags
    loop = replace(chosen, schedule="interleaved")
    assert "--num-virtual-stages-per-pipeline-rank 2" in " ".join(loop.flags())


@pytest.mark.parametrize(
    ("implementation", "bias", "offered"),
    [("local", True, False), ("local", False, True), ("transformer_engine", True, False)],
)
def test_recomputation_that_megatron_cannot_do_is_not_offered(implementation, bias, offered):
    where = space(transformer_impl=implementation, add_bias_linear=bias)
    cut = next(where.cuts())
    of_mlps = [one for one in where.recomputes(cut, 1) if one.name == "recompute-mlp"]
    assert of_mlps == ([Recompute("recompute-mlp", "selective", modules=("mlp",))] if offered else [])


@pytest.mark.parametrize("limit", [30e9, 12e9])
def test_the_best_of_both_ways_to_hold_a_vocabulary(limit):
    """``auto`` tries both; an exhaustive search finds the same, and neither bound keeps any out."""
    where = space(
        fixed=("context_parallel_size",), pipeline_vocabulary="auto", vocab_size=128000, hidden_size=2048
    )
    found = searched_as_exhaustively(where, limit, top=6)
    assert len({one.candidate.splits_head for one in found.best}) == 2
    for one in found.best:
        assert ("--pipeline-vocabulary shared" in " ".join(one.candidate.flags())) is (
            one.candidate.splits_head
        )
        assert one.candidate.name.endswith("-shared") is one.candidate.splits_head


@pytest.mark.parametrize("name", catalog.NAMES)
@pytest.mark.parametrize("batch", [1, 24])
def test_no_candidate_that_shares_is_below_its_bounds(name, batch):
    """Nor is one of the memory: of any order, and of an order with fewer microbatches."""
    rounded = rounding.relative(eps=rounding.FLOAT64)
    pipeline = {"pipeline_model_parallel_size": 4, "pipeline_vocabulary": "shared", "vocab_size": 256000}
    where = space(gpus=4, batch=batch, schedules=(name,), fixed=tuple(pipeline), num_layers=16, **pipeline)
    for candidate in everything(where):
        assert candidate.splits_head
        work, found = estimated(candidate, where)
        bound = bounds(work, candidate.microbatches)[catalog.abilities(name).splits_backward]
        assert found.step_seconds >= bound * (1 - rounded)
        least = least_memory(work, candidate.microbatches, 0.05).total
        at_least = least_memory_sharing(work, name, candidate.microbatches, 0.05).total
        assert max(least, at_least) <= found.fullest.total * (1 + rounded)


@pytest.mark.parametrize("name", catalog.NAMES)
def test_no_rank_keeps_less_of_its_stages_for_sharing_the_vocabulary(name):
    chunks = catalog.entry(name).chunks
    again = {"after_forward": 1.0, "after_input_gradient": 7.0, "workspace": 3.0, "workspace_in_whole": 9.0}
    kept = {"after_forward": 10.0, "after_input_gradient": 7.0}
    for (ranks, microbatches), of_part in product([(2, 4), (3, 6), (4, 9), (6, 30)], (kept, again)):
        parts = [Part(**of_part)] * (ranks * chunks)
        plain = program(name, ranks, 2 * ranks, chunks).in_flight.peaks(parts)
        shared = program(name, ranks, microbatches, chunks, True).in_flight.peaks(parts)
        assert all(more >= less for more, less in zip(shared, plain, strict=True))


def test_a_single_rank_shares_nothing():
    both, only, without = (
        list(everything(space(schedules=("1f1b",), pipeline_vocabulary=which)))
        for which in ("auto", "shared", None)
    )
    assert {(one.pipeline > 1, one.splits_head) for one in both} == {
        (False, False),
        (True, False),
        (True, True),
    }
    assert all(one.splits_head and one.pipeline > 1 for one in only)
    assert not any(one.splits_head for one in without)
    deep = everything(space(schedules=("1f1b",), pipeline_vocabulary="auto", mtp_num_layers=1))
    assert not any(one.splits_head for one in deep)


def test_flex_shares_within_the_memory(short_searches):
    about = {"pipeline_model_parallel_size": 2, "pipeline_vocabulary": "shared", "vocab_size": 128000}
    where = space(gpus=2, batch=6, schedules=("v-half",), fixed=tuple(about), **about)
    of_family, compiled = (
        Search(where, A100, 60e9, compiles=which).run() for which in (Compiles.NEVER, Compiles.ONLY)
    )
    (best, *_) = compiled.best
    assert (best.candidate.schedule, best.candidate.splits_head) == ("flex", True)
    assert best.estimate.fullest.total <= 60e9
    assert best.estimate.step_seconds <= of_family.best[0].estimate.step_seconds
    flags = " ".join(best.candidate.flags())
    assert f"--pipeline-memory-limit {spelled(best.candidate.limit)} --pipeline-vocabulary shared" in flags


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "v-half"])
def test_no_step_in_slices_is_below_its_bounds(name):
    """Nor does a rank keep less than what the search drops candidates by, before slices are planned."""
    pipeline = {"pipeline_model_parallel_size": 4, "num_layers": 16, "seq_length": 16384}
    where = space(gpus=4, batch=6, schedules=(name,), fixed=(*pipeline, "recompute_granularity"),
                  pipeline_slice_tokens="auto", **pipeline)  # fmt: skip
    workloads, sliced = Workloads(where.job, A100), 0
    for candidate in everything(where):
        if candidate.option(Slices) is None or candidate.microbatches < 6:
            continue
        step, sliced = estimated(candidate, where)[1], sliced + 1
        mean = workloads.mean(candidate, candidate.placement)
        assert step.step_seconds >= mean.bounds(6)[catalog.abilities(name).splits_backward]
        cuts = CandidateCuts(
            candidate, workloads.stages(candidate, candidate.placement), workloads, 0.05, 1e12
        )
        assert sum(rank.total for rank in step.ranks) / 4 >= cuts.mean().total
    assert sliced >= 5


def test_a_search_finds_the_best_length_of_slices():
    """It times two lengths of all that fit, and the step is that of the best length within 5%."""
    pipeline = {
        "pipeline_model_parallel_size": 4,
        "num_layers": 16,
        "seq_length": 16384,
        "micro_batch_size": 1,
    }
    where = space(gpus=4, batch=6, schedules=("1f1b",), fixed=tuple(pipeline),
                  pipeline_slice_tokens="auto", **pipeline)  # fmt: skip
    steps = [estimated(candidate, where)[1] for candidate in everything(where)]
    found = Search(where, A100, 35e9, top=1).run()
    best = found.best[0]
    assert found.left_out
    assert best.candidate.option(Slices) is not None
    fitting = min(step.step_seconds for step in steps if step.fullest.total <= 35e9)
    assert fitting <= best.estimate.step_seconds <= 1.05 * fitting


LIMIT, SIZES = 25e9, {"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 1}
AUTO = [
    {"pipeline_vocabulary": "auto"},
    {"pipeline_offload": "auto"},
    {"pipeline_slice_tokens": "auto"},
    {"pipeline_vocabulary": "auto", "pipeline_offload": "auto"},
]


def search(compiles=Compiles.NEVER, **choices) -> Search:
    return Search(space(batch=16, fixed=tuple(SIZES), **SIZES, **choices), A100, LIMIT, 0.05, 8, compiles)


def steps(result) -> list[float]:
    return [one.estimate.step_seconds for one in result.best]


def interrupted_in_round(which: int, phase: str = "bounding"):
    """A progress that interrupts round ``which``, from 1 on, as it begins with a ``phase``."""
    begun = 0

    def progress(what: str, done: int, total: int) -> None:
        nonlocal begun
        begun += (what, done) == (phase, 0)
        if begun == which:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("choices", AUTO, ids=lambda one: "+".join(one))
@pytest.mark.parametrize("compiles", [Compiles.NEVER, Compiles.TOO])
def test_the_first_round_is_the_search_without_choices(choices, compiles):
    alone = search(compiles).run()
    found = search(compiles, **choices).run(interrupted_in_round(2))
    assert steps(found) == steps(alone)
    assert [one.candidate.name for one in found.best] == [one.candidate.name for one in alone.best]
    assert (found.legal, found.unfit, found.replayed) == (alone.legal, alone.unfit, alone.replayed)
    assert found.stopped.untried == tuple(choices)
    assert str(found.stopped) == "interrupted; " + "; ".join(
        f"--{name.replace('_', '-')} was not tried" for name in choices
    )


@pytest.mark.wide
@pytest.mark.parametrize("choices", AUTO, ids=lambda one: "+".join(one))
def test_a_search_with_choices_that_ends_by_itself_is_no_worse(choices):
    alone, found = search().run(), search(**choices).run()
    assert found.stopped is None
    assert all(
        with_choices <= without for with_choices, without in zip(steps(found), steps(alone), strict=False)
    )
    assert len(found.best) >= len(alone.best)


def test_what_a_later_round_has_not_looked_at_is_counted():
    found = search(pipeline_vocabulary="auto").run(interrupted_in_round(2, "replaying"))
    assert found.stopped.remaining and not found.stopped.untried
    unseen = search(pipeline_vocabulary="auto").run()
    shared = [one for one in unseen.best if one.candidate.splits_head]
    assert min(map(lambda one: one.estimate.step_seconds, shared)) >= found.stopped.least_seconds


def test_an_interrupt_before_anything_is_found_is_one_in_each_round():
    with pytest.raises(KeyboardInterrupt):
        Search(space(batch=16, fixed=tuple(SIZES), **SIZES, pipeline_offload="auto"), A100, 1e9).run(
            interrupted_in_round(2)
        )


def test_context_parallel_ranks_share_slices():
    """Slices end where all ranks of a sequence have as many tokens; 4 heads are too few for 8 ranks."""
    cuts = [*space(gpus=16, batch=1, num_attention_heads=4, pipeline_slice_tokens=512).cuts()]
    sizes = {(cut.tensor, cut.context, cut.option(Slices).multiple) for cut in cuts if cut.option(Slices)}
    assert {(1, 2, 2), (2, 2, 4), (1, 4, 4)} <= sizes
    assert all(multiple == tensor * context for tensor, context, multiple in sizes)
    assert max(tensor * context for tensor, context, _ in sizes) == 4
