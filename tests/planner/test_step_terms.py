"""Each term of a step around its kernels: links, collectives, the update, and how they overlap."""

from argparse import Namespace
from typing import Any

import pytest

from megatron_pp_ext.costs import system
from megatron_pp_ext.costs.attention import self_attention
from megatron_pp_ext.costs.kernels import AttentionWork
from megatron_pp_ext.costs.mlp import experts, mlp, routing
from megatron_pp_ext.costs.model_parts import model_parts
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.costs.products import LayerCosts
from megatron_pp_ext.costs.system import Link
from megatron_pp_ext.costs.system_kernels import SystemKernelSeconds
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.job.sizes import require_divisible
from megatron_pp_ext.planner import described
from megatron_pp_ext.planner.search.lower_bounds import bounds
from megatron_pp_ext.planner.step.estimate import Estimate, StepModel, estimate_request
from megatron_pp_ext.planner.step.model_description import describe, model_operations
from megatron_pp_ext.planner.step.programs import placement_of, program
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.messages import SENDS_AHEAD
from megatron_pp_ext.schedule.placement import Placement, linear
from megatron_pp_ext.schedule.simulate import simulate
from tests.costs.test_system import COPY, MACHINE, NETWORK, NODE, RATE, ring

S, H, V = 512, 1024, 32000
MODEL = {
    "num_layers": 8, "hidden_size": H, "num_attention_heads": 8, "seq_length": S, "micro_batch_size": 1,
    "vocab_size": V, "max_position_embeddings": S, "bf16": True, "make_vocab_size_divisible_by": 1,
}  # fmt: skip
HIDDEN = 2 * S * H


def work(ranks=1, data=1, name="1f1b", chunks=1, **changed) -> Workload:
    job = describe({**MODEL, "pipeline_model_parallel_size": ranks, "pipeline_schedule": name, **changed})
    return Workload(job, MACHINE, placement_of(name, ranks, chunks), data)


def step(made: Workload, microbatches=8, name="1f1b", chunks=1) -> Estimate:
    return StepModel(
        made, program(name, made.placement.ranks, microbatches, chunks), name, microbatches
    ).estimate()


def kernels(**changed) -> SystemKernelSeconds:
    return SystemKernelSeconds(MACHINE, describe({**MODEL, **changed}))


def test_products_run_at_their_rate_or_that_of_memory():
    plain = kernels()
    assert plain.product(1000, 2000, 3000) == pytest.approx(2 * 6e9 / RATE)
    thin = 2 * (1000 * 2 + 2 * 3000)
    assert plain.product(1000, 3000, 2) == pytest.approx((thin + 2 * 1000 * 3000) / COPY)
    # Adding to a gradient in fp32 reads it and writes it.
    assert plain.product(1000, 3000, 2, adds=True) == pytest.approx((thin + 8 * 1000 * 3000) / COPY)
    assert kernels(fp8="hybrid").product(1000, 2000, 3000) == pytest.approx(2 * 6e9 / (3 * RATE))


def test_attention_is_causal_where_it_is_fused():
    """A fused kernel does half of the operations at 0.7 of the rate; its backward does 2.5 times as many."""
    for made in (kernels(attention_dropout=0), kernels(attention_dropout=0, fp8="hybrid")):
        half = 1e12 / 2 / (0.7 * RATE)
        assert made.attention(AttentionWork(1e12, 1e6, True, 64)) == pytest.approx((half, 2.5 * half))
    plain = 1e12 / RATE
    for dropout, more in ((0.0, 0.0), (0.1, 2.5e6 / COPY)):
        forward, backward = kernels(attention_dropout=dropout).attention(AttentionWork(1e12, 1e6, False, 64))
        assert forward == pytest.approx(plain + 4e6 / COPY + more)
        assert backward == pytest.approx(2 * plain + 7e6 / COPY + more)


def test_parts_of_attention_hide_the_messages_behind_them():
    """The first part waits for nothing; results of the others are added, two read and one written."""
    made = kernels(context_parallel_size=4)
    message, added = made.ring(0.0, 1e6, 0.0) / 3, made.addition(1e3)
    assert made.ring(40 * message, 1e6, 1e3) == pytest.approx(40 * message + 3 * added)
    assert made.ring(2 * message, 1e6, 1e3) == pytest.approx(message / 2 + 3 * (message + added))


def test_groups_of_a_layer():
    """Tensor-parallel ranks are neighbours, and everything else counts in strides of them."""
    made = kernels(
        tensor_model_parallel_size=2, context_parallel_size=3, num_experts=8, expert_model_parallel_size=4
    )
    assert made.gather(1e6) == pytest.approx(ring(1e6, 2))
    # Two of the four are on a node, so that half of the bytes leave it.
    assert made.shuffle(1e6) == pytest.approx(NETWORK.seconds(5e5))
    message = Link(2e10, 1e-5).seconds(1e6)
    assert made.ring(0.0, 1e6, 0.0) == pytest.approx(2 * message)
    assert kernels().ring(3.0, 1e6, 1e6) == 3.0
    etp = kernels(
        tensor_model_parallel_size=2,
        num_experts=8,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=1,
    )
    assert etp.shuffle(1e6) == pytest.approx(NODE.seconds(7.5e5))


@pytest.mark.parametrize(
    ("ranks", "data", "changed", "link"),
    [
        (2, 1, {}, NODE),
        (4, 1, {}, NODE),
        (5, 1, {"num_layers": 10}, NETWORK),
        (2, 2, {}, NODE),
        (2, 4, {}, NETWORK),
        (4, 2, {}, NETWORK),
        (2, 2, {"context_parallel_size": 2}, NETWORK),
        (2, 2, {"tensor_model_parallel_size": 2}, NETWORK),
    ],
)
def test_a_hop_crosses_the_network_where_neighbours_are_on_other_nodes(ranks, data, changed, link):
    made = work(ranks, data, **changed)
    assert made.costs.hop == pytest.approx(link.seconds(HIDDEN / changed.get("context_parallel_size", 1)))
    size = 4 * V * H / changed.get("tensor_model_parallel_size", 1)
    assert made.tied_seconds == pytest.approx(link.seconds(size))


def test_who_sums_a_tied_weight():
    assert work(2, grad_reduce_in_bf16=True).tied_seconds == pytest.approx(NODE.seconds(2 * V * H))
    assert work(2, untie_embeddings_and_output_weights=True).tied_seconds == 0
    assert work(2, name="v-half", chunks=2).tied_seconds == work(1).tied_seconds == work(1).costs.hop == 0


def test_gradients_are_reduced_and_weights_gathered():
    """Sharded: a reduce-scatter of fp32 gradients, a gathering of bf16 weights. Otherwise an all-reduce."""
    plain, sharded = (work(data=4, use_distributed_optimizer=on) for on in (False, True))
    weights = plain.by_rank[0].parameters
    assert plain.waits[0].reduction == pytest.approx(2 * ring(4 * weights, 4))
    assert plain.waits[0].gathering == 0
    assert sharded.waits[0].reduction == pytest.approx(ring(4 * weights, 4))
    assert sharded.waits[0].gathering == pytest.approx(ring(2 * weights, 4))
    half = work(data=4, grad_reduce_in_bf16=True)
    assert half.waits[0].reduction == pytest.approx(2 * ring(2 * weights, 4))


def test_context_parallel_ranks_share_gradients_too():
    made = work(data=2, context_parallel_size=2, tensor_model_parallel_size=2, use_distributed_optimizer=True)
    weights = made.by_rank[0].parameters
    assert made.waits[0].reduction == pytest.approx(ring(4 * weights, 4, MACHINE.link(4, 2), within=2))
    assert made.states[0].optimizer == pytest.approx(12 * weights / 4)


def test_an_update_passes_over_its_share_of_the_weights():
    """Adam: the gradient read for its norm, read, written and zeroed; weight and moments read and written."""
    for data, sharded in ((1, False), (4, False), (4, True)):
        made = work(data=data, use_distributed_optimizer=sharded)
        weights = made.by_rank[0].parameters
        touched = 38 * weights / (data if sharded else 1) + 4 * weights
        assert made.waits[0].update == pytest.approx(touched / COPY)


def test_experts_reduce_among_those_that_have_them():
    """Eight ranks, experts over four of them: two replicas, four ranks apart."""
    made = work(data=8, num_experts=8, expert_model_parallel_size=4, use_distributed_optimizer=True)
    part = made.by_rank[0]
    assert (made.sharing.dense, made.sharing.expert) == (8, 2)
    dense = ring(4 * part.parameters, 8, MACHINE.link(8, 1), within=6)
    assert made.waits[0].reduction == pytest.approx(dense + ring(4 * part.expert_parameters, 2, NETWORK))
    assert made.states[0].optimizer == pytest.approx(12 * (part.parameters / 8 + part.expert_parameters / 2))
    tensor = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    assert work(data=4, num_experts=8, expert_model_parallel_size=4, **tensor).sharing.expert == 2


def test_instances_of_the_optimizer_reduce_within_and_then_across():
    """Eight replicas in two instances: four ranks share the state, and ranks four apart sum their shares."""
    made = work(data=8, use_distributed_optimizer=True, num_distributed_optimizer_instances=2)
    weights, waits = made.by_rank[0].parameters, made.waits[0]
    across = 2 * ring(4 * weights / 4, 2, MACHINE.link(2, 4), within=0)
    assert waits.reduction == pytest.approx(ring(4 * weights, 4) + across)
    assert waits.gathering == pytest.approx(ring(2 * weights, 4))
    assert made.states[0].optimizer == pytest.approx(12 * weights / 4)
    assert waits.update == pytest.approx((38 * weights / 4 + 4 * weights) / COPY)
    # Without shared state there is nothing to divide.
    plain, divided = (work(data=8, num_distributed_optimizer_instances=number) for number in (1, 2))
    assert divided.waits == plain.waits and divided.states == plain.states


def test_experts_have_instances_of_their_own():
    """Eight ranks, experts over two of them: four replicas of an expert, two of them in an instance."""
    sizes = {"num_experts": 8, "expert_model_parallel_size": 2, "use_distributed_optimizer": True}
    made = work(data=8, num_distributed_optimizer_instances=2, **sizes)
    part = made.by_rank[0]
    assert made.states[0].optimizer == pytest.approx(12 * (part.parameters / 4 + part.expert_parameters / 2))
    sharers = 8 // 2
    with pytest.raises(ValueError, match=f"instances 8 does not divide the {sharers} ranks that have the"):
        require_divisible(describe({**MODEL, **sizes, "num_distributed_optimizer_instances": 8}), 8)


def test_a_step_on_one_rank_is_the_sum_of_what_it_does():
    made = work(data=4, use_distributed_optimizer=True)
    part, waits = made.by_rank[0], made.waits[0]
    found = step(made, 8, "none")
    each = part.forward_seconds + part.input_gradient_seconds + part.weight_gradient_seconds
    assert found.pipeline_seconds == pytest.approx(8 * each)
    assert found.step_seconds == pytest.approx(8 * each + waits.reduction + waits.gathering + waits.update)
    assert found.bubble == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("ranks", "rows"), [(1, 4), (4, 4), (64, 64)])
def test_the_last_bucket_cannot_be_hidden(ranks, rows):
    """Megatron's buckets have 40 million weights, or a million for each data-parallel rank."""
    overlaps = {"overlap_grad_reduce": True, "overlap_param_gather": True, "use_distributed_optimizer": True}
    made = work(data=ranks, **overlaps)
    share = min(1, max(40e6, ranks * 1e6) / made.by_rank[0].parameters)
    assert made.last_bucket(0) == pytest.approx(share)
    waits = made.waits[0]
    exposed = step(made, 2, "none").other_seconds - waits.update
    hidden = made.by_rank[0].forward_seconds
    gathered = max(share * waits.gathering, waits.gathering - hidden)
    reduced = max(share * waits.reduction, waits.reduction - made.backward_seconds(0))
    assert exposed == pytest.approx(gathered + reduced)


@pytest.mark.parametrize("first_layers", [4, 1])
def test_a_rank_reduces_while_others_still_work_and_gathers_before_it_is_reached(first_layers):
    """1F1B's last rank begins after one forward and a hop, and ends a backward and a hop before the first."""
    changed = {"use_distributed_optimizer": True, "decoder_first_pipeline_num_layers": first_layers}
    made = work(2, 4, untie_embeddings_and_output_weights=True, **changed)
    first, last = made.waits
    reached = made.costs.stages[0].forward + made.costs.hop
    ahead = made.backward_seconds(0) + made.costs.hop
    if first_layers == 1:  # The last rank then has so many weights that it is the one to wait for.
        assert last.gathering - reached > first.gathering
        assert last.reduction - ahead > first.reduction
    before = max(first.gathering, last.gathering - reached)
    after = max(first.reduction, last.reduction - ahead)
    update = max(first.update, last.update)
    assert step(made).other_seconds == pytest.approx(before + after + update)
    tied = work(2, 4, **changed)
    assert step(tied).other_seconds == pytest.approx(before + after + update + tied.tied_seconds)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("v-half", 2)])
def test_the_pipeline_is_the_simulated_one(name, chunks):
    made = work(2, name=name, chunks=chunks)
    found, timeline = step(made, 8, name, chunks), simulate(catalog.build(name, 2, 8), made.costs)
    assert found.pipeline_seconds == pytest.approx(timeline.makespan)
    assert found.bubble == pytest.approx(timeline.bubble)
    assert [rank.activations for rank in found.ranks] == pytest.approx(timeline.peak_activations)


def test_megatrons_own_functions_wait_for_messages():
    """1F1B always does, and interleaved where its messages do not overlap computation."""
    ours, stock = work(4), work(4, pipeline_schedule=None)
    waiting = simulate(catalog.build("1f1b", 4, 8), stock.costs.waiting_for_messages(stock.placement))
    assert step(stock).pipeline_seconds == pytest.approx(waiting.makespan)
    assert step(stock).pipeline_seconds > step(ours).pipeline_seconds
    busy = [(1 - found.bubble) * found.pipeline_seconds for found in (step(stock), step(ours))]
    assert busy[0] == pytest.approx(busy[1])

    def interleaved(**changed: object) -> float:
        made = work(4, name="interleaved", chunks=2, **changed)
        return step(made, 8, "interleaved", 2).pipeline_seconds

    assert interleaved() == interleaved(pipeline_schedule=None)
    assert interleaved() < interleaved(pipeline_schedule=None, overlap_p2p_comm=False)


@pytest.mark.parametrize(
    ("name", "chunks", "slots"), [("1f1b", 1, [4, 3, 2, 1]), ("zb-h1", 1, [4] * 4), ("v-half", 2, [6] * 4)]
)
def test_graphs_of_layers_keep_the_memory_of_their_slots(name, chunks, slots):
    """Each has that of the layers of the largest stage, and an output and its gradients for each layer.

    What the embedding and the head keep comes and goes.
    """
    graphs = {"pipeline_schedule": name, "cuda_graph_impl": "transformer_engine"}
    graphed = work(4, name=name, chunks=chunks, **graphs)
    layer, of_stage = graphed.model.layers[0], MODEL["num_layers"] // 4 // chunks
    kept = of_stage * max(layer.after_forward, layer.after_input_gradient)
    tensors = (2 if name == "1f1b" else 3) * HIDDEN * MODEL["num_layers"] // 4
    order = program(name, 4, 8, chunks)
    ends = [
        Part(
            after_forward=part.after_forward - of_stage * layer.after_forward,
            after_input_gradient=part.after_input_gradient - of_stage * layer.after_input_gradient,
        )
        for part in graphed.parts
    ]
    expected = [count * (kept + tensors) for count in slots]
    found = step(graphed, 8, name, chunks).ranks
    for rank, (bytes_of_slots, of_ends) in enumerate(zip(expected, order.in_flight.peaks(ends), strict=True)):
        assert found[rank].activations == pytest.approx(bytes_of_slots + of_ends)
    plain = work(4, name=name, chunks=chunks)
    under_stock = work(4, name=name, chunks=chunks, **{**graphs, "pipeline_schedule": None})
    assert step(under_stock, 8, name, chunks).ranks == step(plain, 8, name, chunks).ranks


MODULES = {
    ("attn",): lambda costs: self_attention(costs),
    ("mlp",): lambda costs: mlp(costs),
    ("attn", "mlp"): lambda costs: self_attention(costs) + mlp(costs),
    ("attn", "moe_router"): lambda costs: self_attention(costs) + routing(costs),
    ("moe_router",): lambda costs: routing(costs),
    ("moe",): lambda costs: experts(costs),
}


@pytest.mark.parametrize("modules", MODULES)
def test_graphs_keep_what_their_modules_do(modules):
    """Each of ZB-H1's stages has two layers in 4 slots; all else is kept while it is in flight."""
    has_experts = any("moe" in module for module in modules)
    sizes = {"num_experts": 4, "moe_ffn_hidden_size": 512} if has_experts else {}
    graphs = {"pipeline_schedule": "zb-h1", "cuda_graph_impl": "transformer_engine", **sizes}
    graphed = work(4, name="zb-h1", cuda_graph_modules=[*modules], **graphs)
    captured = MODULES[modules](LayerCosts(describe({**MODEL, **sizes}), None))
    assert not captured.workspace
    part = graphed.parts[1]
    rest = Part(
        after_forward=part.after_forward - 2 * captured.after_forward,
        after_input_gradient=part.after_input_gradient - 2 * captured.after_input_gradient,
        workspace=part.workspace,
    )
    kept = 2 * max(captured.after_forward, captured.after_input_gradient) + 2 * 3 * HIDDEN
    besides = program("zb-h1", 4, 8, 1).in_flight.peaks([rest] * 4)[1]
    assert step(graphed, 8, "zb-h1").ranks[1].activations == pytest.approx(4 * kept + besides)


def test_a_scope_that_no_layer_has_takes_no_memory():
    graphs = {"pipeline_schedule": "zb-h1", "cuda_graph_impl": "transformer_engine"}
    scoped = work(4, name="zb-h1", cuda_graph_modules=["mamba"], **graphs)
    assert step(scoped, 8, "zb-h1").ranks == step(work(4, name="zb-h1"), 8, "zb-h1").ranks


def test_the_search_s_bound_is_1f1b_s_step_where_the_last_stage_is_slowest():
    """The way to it, its work, and the way back of its last gradient; then the update and the tied weight."""
    made = work(4)
    first, last = made.by_rank[0], made.by_rank[-1]
    assert last.forward_seconds > 1.5 * first.forward_seconds
    assert bounds(made, 8)[0] == pytest.approx(step(made).step_seconds)
    others = sum(stage.input_gradient + stage.weight_gradient for stage in made.costs.stages[:-1])
    assert bounds(made, 8)[0] - bounds(made, 8)[1] == pytest.approx(others + 3 * made.costs.hop)


@pytest.mark.parametrize(("fp8", "peak"), [(None, 4e14), ("hybrid", 8e14)])
def test_utilisation_and_tokens_are_of_the_whole_machine(fp8, peak):
    """The same batch on one GPU and on sixteen: as many tokens, as many operations, 16 times the peak."""
    batch = 16
    one = work(1, fp8=fp8)
    changed = {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True}
    many = work(2, 2, fp8=fp8, **changed)
    few, spread = step(one, batch, "none"), step(many, batch // 2)
    assert few.tokens_per_second * few.step_seconds == pytest.approx(batch * S)
    assert spread.tokens_per_second * spread.step_seconds == pytest.approx(batch * S)
    done = [found.utilisation * found.step_seconds for found in (few, spread)]
    assert done[0] * peak == pytest.approx(model_operations(one.job, batch))
    assert done[1] * 16 == pytest.approx(done[0], rel=1e-3)


def test_recomputation_is_no_model_operation():
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert model_operations(work(**again).job, 4) == model_operations(work().job, 4)


def test_memory_is_the_sum_of_its_parts_with_a_margin_on_what_comes_and_goes():
    made = work(2, 2, use_distributed_optimizer=True)
    for rank, (found, state) in enumerate(zip(step(made).ranks, made.states, strict=True)):
        assert (found.weights, found.gradients, found.optimizer) == (
            state.weights,
            state.gradients,
            state.optimizer,
        )
        assert found.loss == (rank == 1) * (2 * S * V + made.model.output_buffer)
        assert found.margin == pytest.approx(0.05 * (found.activations + found.messages + found.loss))
        assert found.versions == 0


BASE = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --vocab-size 32000 --bf16 "
    "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 32"
)
EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 512 --moe-router-topk 2 --disable-bias-linear"
LATENT = "--multi-latent-attention --kv-lora-rank 128 --qk-head-dim 64 --v-head-dim 96"
MODELS = {
    "dense": "",
    "gated, of grouped queries": "--swiglu --group-query-attention --num-query-groups 4 --kv-channels 96",
    "of windows": "--window-size 127,0",
    "experts": f"{EXPERTS} --moe-layer-freq 3 --moe-shared-expert-intermediate-size 256 --swiglu",
    "latent experts": f"{EXPERTS} --moe-latent-size 256 --squared-relu",
    "latent attention": f"{LATENT} --q-lora-rank 256",
    "latent keys alone": LATENT,
    "predicting": f"{EXPERTS} --mtp-num-layers 2 --swiglu",
    "recomputed": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "linear": "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --swiglu",
    "hybrid": f"--hybrid-layer-pattern M-*EM-ME --mamba-num-heads 32 {EXPERTS}",
    "hybrid, predicting": f"--hybrid-layer-pattern M-*EM-ME/*-/*- {EXPERTS} --position-embedding-type none",
}


@pytest.mark.parametrize("name", MODELS)
def test_as_megatron_counts(name: str) -> None:
    training = pytest.importorskip("megatron.training.training")
    job = described.read([*BASE.split(), *MODELS[name].split()], None).job
    given = vars(job.args)
    derived = {
        "padded_vocab_size": job.padded_vocabulary,
        "kv_channels": job.model.head_width,
        "ffn_hidden_size": job.model.mlp_width,
        "num_experts": given["num_experts"] or None,
        "mtp_num_layers": job.model.mtp_num_layers or None,
    }
    expected = training.num_floating_point_operations(Namespace(**{**given, **derived}), 32)
    assert model_operations(job, 32) == pytest.approx(expected)


MICROBATCHES = 32
MODEL_WITH_HEAD = (
    "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --vocab-size 128000 "
    "--max-position-embeddings 4096 --bf16 --untie-embeddings-and-output-weights "
    f"--micro-batch-size 1 --global-batch-size {MICROBATCHES} --pipeline-model-parallel-size 4"
)
LOGITS = 4096 * 128000
DEFER = ("--defer-embedding-wgrad-compute", "--wgrad-deferral-limit")


def estimated(*more: str) -> Estimate:
    asked = described.read([*MODEL_WITH_HEAD.split(), *more], None).counted()
    return estimate_request(asked, system.read("h100"), for_world(asked, 4))


def test_only_microbatches_within_the_limit_keep_what_deferred_gradients_read() -> None:
    """As megatron.core.tensor_parallel.layers does: 0 defers those of all microbatches."""
    plain = estimated().ranks[-1].loss
    waiting = {limit: estimated(*DEFER, limit).ranks[-1].loss - plain for limit in ("8", "16", "32", "0")}
    each = 2 * (LOGITS + 4096 * 4096)
    assert waiting == {
        limit: pytest.approx(count * each) for limit, count in zip(waiting, (8, 16, 32, 32), strict=True)
    }


def test_what_is_not_deferred_is_computed_in_its_backward() -> None:
    none, some, every = (estimated(*flags) for flags in ((), (*DEFER, "8"), (*DEFER, "0")))
    assert none.pipeline_seconds > some.pipeline_seconds > every.pipeline_seconds
    assert 0 < some.other_seconds - none.other_seconds < every.other_seconds - none.other_seconds


def test_a_limit_without_deferring_changes_nothing() -> None:
    assert estimated(DEFER[1], "8") == estimated()


def test_a_schedule_defers_nothing_by_flag() -> None:
    schedule = ("--pipeline-schedule", "zb-h1")
    assert estimated(*schedule, *DEFER, "8") == estimated(*schedule)


def test_a_loss_in_the_place_of_the_logits_keeps_less() -> None:
    fused = "--cross-entropy-loss-fusion"
    plain, native = estimated(), estimated(fused)
    in_place = estimated(fused, "--cross-entropy-fusion-impl", "te")
    # A compiled loss has a copy of the logits in fp32, one in their place has none of them besides.
    assert native.ranks[-1].loss - plain.ranks[-1].loss == pytest.approx(4 * LOGITS)
    assert plain.ranks[-1].loss - in_place.ranks[-1].loss == pytest.approx(2 * LOGITS)
    # Half of what fp32 probabilities take, for the one microbatch that the last rank has in flight.
    kept = plain.ranks[-1].activations - in_place.ranks[-1].activations
    assert kept == pytest.approx(2 * LOGITS)
    assert plain.step_seconds > native.step_seconds > in_place.step_seconds


MODEL_WITH_MESSAGES = {
    "num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 256, "micro_batch_size": 3,
    "vocab_size": 32000, "bf16": True,
}  # fmt: skip
H100 = system.read("h100")
HIDDEN_SIZE = 2 * 256 * 3 * 512


def workload_of_messages(placement: Placement, **changed: object) -> Workload:
    return Workload(describe({**MODEL_WITH_MESSAGES, **changed}), H100, placement, 1)


@pytest.mark.parametrize(
    ("changed", "size"),
    [
        ({}, HIDDEN_SIZE),
        ({"bf16": False}, 2 * HIDDEN_SIZE),
        ({"tensor_model_parallel_size": 2}, HIDDEN_SIZE),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, HIDDEN_SIZE / 2),
        ({"context_parallel_size": 4}, HIDDEN_SIZE / 4),
        ({"fp32_residual_connection": True}, 2 * HIDDEN_SIZE),
        ({"fp32_residual_connection": True, "bf16": False}, 2 * HIDDEN_SIZE),
    ],
)
def test_the_size_of_a_message(changed: dict, size: float) -> None:
    assert workload_of_messages(linear(4), **changed).costs.message == size


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "v-half", "breadth-first"])
def test_a_rank_s_messages(name: str) -> None:
    schedule = catalog.build(name, 4, 8)
    program_ = program(name, 4, 8, schedule.placement.chunks)
    found = StepModel(workload_of_messages(schedule.placement), program_, name, 8).estimate()
    assert [rank.messages / HIDDEN_SIZE for rank in found.ranks] == list(program_.peak_messages)
    for rank in found.ranks:
        parts = dict(rank.components())
        assert rank.total == pytest.approx(sum(parts.values()))
        assert rank.margin == pytest.approx(0.05 * (rank.activations + rank.messages + rank.loss))


def test_one_rank_has_none() -> None:
    (rank,) = StepModel(workload_of_messages(linear(1)), program("none", 1, 4, 1), "none", 4).memory()
    assert rank.messages == 0


def test_without_a_flush_sends_of_earlier_updates_count() -> None:
    """An update of one microbatch sends one message a rank, but the pipeline goes on."""
    made = workload_of_messages(linear(4), pipeline_model_parallel_size=4)
    ranks = StepModel(made, program("pipedream", 4, 1, 1), "pipedream", 1).memory()
    assert [rank.messages / HIDDEN_SIZE - SENDS_AHEAD - 1 for rank in ranks] == [1, 2, 2, 2]


SPARSE = {
    "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 64, "dsa_indexer_head_dim": 128,
    "dsa_indexer_topk": 2048, "dsa_indexer_loss_coeff": 0.01,
}  # fmt: skip
SPLIT_MODELS: dict[str, tuple[str, dict[str, Any], float]] = {
    "DeepSeek-V3": ("deepseek-v3", {}, 0.997),
    "Kimi-K2": ("kimi-k2", {}, 0.995),
    "DeepSeek-V3.2": ("deepseek-v3", SPARSE, 0.970),
    "Qwen3-Next": ("qwen3-next-80b", {}, 0.985),
    "gpt-oss-120b": ("gpt-oss-120b", {}, 0.997),
    "gpt-oss-20b": ("gpt-oss-20b", {}, 0.999),
    "Nemotron-H": ("nemotron-h-56b", {}, 1.0),
    "Nemotron-3": ("nemotron-3-nano", {}, 0.997),
}
"""Shipped models, what flags add to them, and the share of their weight gradients that waits for W."""


def share(name: str, more: dict[str, Any]) -> float:
    """Return the share of the operations: two for each weight that a token uses, of which W has those of
    products with a weight in a linear layer."""
    job = describe({**described.read_model(name).values, "micro_batch_size": 1, "bf16": True, **more})
    model = model_parts(job)
    used = sum(model.layers, model.last_norm + model.output)
    chosen = job.model.moe_router_topk / (job.model.num_experts or 1)
    active = used.parameters + chosen * used.expert_parameters
    return used.weight_operations / (2 * job.model.seq_length * active)


@pytest.mark.parametrize("model", SPLIT_MODELS)
def test_nearly_all_of_the_weight_gradients_wait_for_w(model: str) -> None:
    name, more, expected = SPLIT_MODELS[model]
    assert share(name, more) == pytest.approx(expected, abs=0.0005)
