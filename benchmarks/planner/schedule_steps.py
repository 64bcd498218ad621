"""Published steps of ``reference.schedule_ratios``, predicted: by their profiled costs, or by sizes alone."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from megatron_pp_ext.costs import system
from megatron_pp_ext.costs.system import Link, System
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.planner.layout import requested_layout
from megatron_pp_ext.planner.step.estimate import estimate_request, waits_around
from megatron_pp_ext.planner.step.model_description import asked_of, describe
from megatron_pp_ext.planner.step.programs import program
from megatron_pp_ext.planner.step.workload import Workload
from megatron_pp_ext.schedule.actions import Action, Kind, Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.placement import Placement
from megatron_pp_ext.schedule.program import as_list
from megatron_pp_ext.schedule.timing import ScheduleTimer
from reference.schedule_ratios import Profile, PublishedStep, models, profiles, steps

FAMILIES = {
    "1F1B": "1f1b",
    "1F1B-I": "interleaved",
    "ZB-1p": "zb-h1",
    "ZB-H1": "zb-h1",
    "ZB-2p": "zb-h2",
    "ZB-2p*": "zb-h2",
    "ZB-H2": "zb-h2",
    "ZB-V": "v-zb",
}
"""Our names of the schedules.  ZB-1p is ZB-H1 by its computed bubbles; ZB-2p's order is its authors' own."""

VOCABULARY = 32_000
"""The vocabulary of Zero Bubble's and CrossPipe's models, which nobody printed.  With tied weights it makes
14.6B and 28.3B of the former's layers, as printed; 50,257 would make 14.7B and 28.4B."""

_STAGE_LAYERS = {"1.5B": 3, "6.2B": 4, "14.6B": 3, "28.3B": 2}
"""The layers of a stage between the ends of table 4, as many as 1F1B-I has chunks.  The stages of table 6
have 2, of which ZB-V has a chunk each: its ranks divide the layers of table 4 so."""

_STAGE_LAYERS_6 = 2


def stage_layers(step: PublishedStep) -> int:
    """Return the layers of a stage between the ends."""
    return _STAGE_LAYERS_6 if step.table == "zero-bubble-6" else _STAGE_LAYERS[step.model]


def chunks(step: PublishedStep) -> int:
    """Return the chunks of a rank."""
    return {"1F1B-I": stage_layers(step) if step.model in _STAGE_LAYERS else 2, "ZB-V": 2}.get(
        step.schedule, 1
    )


class Effects(NamedTuple):
    """What is added to the order alone, with profiled costs.

    ``waits``: ranks of Megatron's own schedules wait for their messages.  ``middle``: the profiled times are
    means over stages, of which those between the ends have a layer more than the ends.  ``action`` are the
    seconds of every action besides its kernels.
    """

    waits: bool = False
    middle: bool = False
    action: float = 0.0


ORDER, WAITS = Effects(), Effects(waits=True)


def profile_of(step: PublishedStep) -> Profile:
    """Return the profiled costs of the stages of ``step``.

    Those of the nearest number of microbatches are taken, in proportion to layers and samples.
    """
    known = {count: profile for (model, count), profile in profiles().items() if model == step.model}
    profile = known[min(known, key=lambda count: abs(count - step.microbatches))]
    samples = step.samples / profile.samples
    size = samples * stage_layers(step) / _STAGE_LAYERS[step.model]
    times = (profile.forward, profile.input_gradient, profile.weight_gradient)
    return Profile(*(size * time for time in times), hop=samples * profile.hop, samples=step.samples)


def between_ends(step: PublishedStep) -> float:
    """Return how much longer a stage between the ends takes than the mean stage.

    The first has a layer less, and the last has the output layer in its place, whose products are so many of
    a layer's.
    """
    layers, hidden = stage_layers(step), models()[step.model]["hidden_size"]
    output = VOCABULARY / (12 * hidden)
    return layers * step.ranks / (layers * step.ranks - 2 + output)


def profiled_costs(step: PublishedStep, effects: Effects) -> Costs:
    """Return the costs of the stages of ``step``."""
    profile, count = profile_of(step), chunks(step)
    size = between_ends(step) if effects.middle else 1.0
    costs = Costs.per_rank(
        step.ranks,
        count,
        forward=size * profile.forward,
        input_gradient=size * profile.input_gradient,
        weight_gradient=size * profile.weight_gradient,
        hop=profile.hop,
    )
    if effects.waits and step.schedule in ("1F1B", "1F1B-I"):
        costs = costs.waiting_for_messages(_placement(step), at_once=count > 1)
    return costs.longer_by(effects.action)


def _placement(step: PublishedStep) -> Placement:
    return _timer(step).schedule.placement


def _timer(step: PublishedStep) -> ScheduleTimer:
    return program(FAMILIES[step.schedule], step.ranks, step.microbatches, chunks(step)).timer


def profiled_seconds(step: PublishedStep, effects: Effects = ORDER) -> float:
    """Return the seconds of ``step`` by its profiled costs.

    A step of 1F1B takes the makespan.  The zero-bubble ones update weights without a flush, and take the
    longest rank's time.  That of ZB-2p's own order is where table 5 has it.
    """
    costs = profiled_costs(step, effects)
    idle = published_bubbles().get((step.model, step.microbatches, step.schedule))
    if step.schedule == "ZB-2p" and idle is not None:
        stage = costs.stages[0]
        work = stage.forward + stage.input_gradient + stage.weight_gradient
        return step.microbatches * work / (1 - idle)
    spans = _timer(step).spans(costs)
    if step.schedule.startswith("ZB"):
        return float(max(span.end - span.start for span in spans))
    return float(max(span.end for span in spans))


@cache
def published_bubbles() -> Mapping[tuple[str, int, str], float]:
    """Return the bubbles of table 5, by model, microbatches and schedule."""
    return {(step.model, step.microbatches, step.schedule): step.value for step in steps("zero-bubble-5")}


def bubble(step: PublishedStep) -> float:
    """Return the idle part of the longest rank's time, by profiled costs and the order alone."""
    spans = _timer(step).spans(profiled_costs(step, ORDER))
    longest = max(span.end - span.start for span in spans)
    return float(1 - spans[0].busy / longest)


@cache
def fitted_action(left_out: str = "") -> float:
    """Return the seconds of an action by which the steps of table 4 are fitted best, without a model's.

    It is the one number that is fitted, by the least squares of relative errors.
    """
    unit = 1e-3
    without, with_unit = (Effects(waits=True, middle=True, action=seconds) for seconds in (0.0, unit))
    products, squares = 0.0, 0.0
    for step in steps("zero-bubble-4"):
        if step.model == left_out:
            continue
        least = profiled_seconds(step, without)
        slope = (profiled_seconds(step, with_unit) - least) / unit
        products += (step.seconds - least) * slope / step.seconds**2
        squares += slope**2 / step.seconds**2
    return products / squares


def with_action(step: PublishedStep) -> float:
    """Return the seconds by profiled costs with all effects; the constant is fitted without its model."""
    return profiled_seconds(step, Effects(waits=True, middle=True, action=fitted_action(step.model)))


def _zero_bubble_job(step: PublishedStep) -> dict[str, Any]:
    """The flags of the authors' public script that are not printed: dropout and unfused attention.

    Attention in single operations with dropout is what F of table 9 takes here.  Interleaved messages do not
    overlap there (--no-overlap-p2p-communication).
    """
    return {
        **models()[step.model],
        "seq_length": step.length,
        "max_position_embeddings": step.length,
        "vocab_size": VOCABULARY,
        "fp16": True,
        "attention_backend": "unfused",
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
        "use_distributed_optimizer": True,
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    }


def _crosspipe_job(step: PublishedStep) -> dict[str, Any]:
    recomputed = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    return {
        **models()[step.model],
        "group_query_attention": True,
        "swiglu": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
        "vocab_size": VOCABULARY,
        "seq_length": step.length,
        "max_position_embeddings": step.length,
        "bf16": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tensor_model_parallel_size": step.tensor,
        "sequence_parallel": True,
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
        **(recomputed if step.setting["recomputes"] else {}),
    }


def _vocabulary_job(step: PublishedStep) -> dict[str, Any]:
    return {
        **models()[step.model],
        "seq_length": step.length,
        "max_position_embeddings": step.length,
        "vocab_size": step.setting["vocabulary"],
        "fp16": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "untie_embeddings_and_output_weights": True,
        "use_distributed_optimizer": True,
    }


_FLAGS: Mapping[str, Callable[[PublishedStep], dict[str, Any]]] = {
    "zero": _zero_bubble_job,
    "crosspipe": _crosspipe_job,
    "vocabulary": _vocabulary_job,
}


def job_of(step: PublishedStep) -> RequestedJob:
    """Return the job of ``step`` under its schedule: Megatron's own, or ours of that order.

    What spreads layers unequally has the layout that the planner chooses.
    """
    flags: dict[str, Any] = {
        **_FLAGS[step.table.partition("-")[0]](step),
        "micro_batch_size": step.samples,
        "global_batch_size": step.microbatches * step.samples,
        "pipeline_model_parallel_size": step.ranks,
    }
    family = FAMILIES.get(step.schedule, "1f1b")
    if step.schedule == "1F1B-I":
        flags |= {"num_virtual_stages_per_pipeline_rank": chunks(step), "overlap_p2p_comm": False}
    elif family != "1f1b":
        flags["pipeline_schedule"] = family
    elif step.schedule.startswith("vocab-"):
        flags |= {"pipeline_schedule": "1f1b", "pipeline_vocabulary": "shared"}
    elif step.schedule == "redis":
        flags["pipeline_model_parallel_layout"] = "auto"
    job = asked_of(describe(flags))
    if not job.pipeline.finds_layout:
        return job
    return requested_layout.resolve(job, 1, job.model.vocab_size)[0]


@cache
def machine(table: str) -> System:
    """Return the system of ``table``: GH200 is an H100 in nodes of four, with Slingshot at 200 Gb/s."""
    if table != "crosspipe-5":
        return system.read("a100-80g")
    hopper = system.read("h100")
    network = Link(25e9, hopper.network.latency_seconds)
    return replace(hopper, name="gh200", gpus_per_node=4, network=network, memory_bytes=96e9)


@cache
def planned_seconds(step: PublishedStep, starts: int = 0) -> float:
    """Return the seconds that the planner estimates by sizes alone, or with the slow link's delays.

    An action takes so many ``starts`` of a kernel more.
    """
    if step.table == "crosspipe-5":
        return crosspipe_seconds(step, waits=True)
    job = job_of(step).changed(action_starts=starts)
    request = for_world(job, step.ranks * step.tensor)
    return estimate_request(job, machine(step.table), request).step_seconds


def planned_with_action(step: PublishedStep) -> float:
    """Return the same with the constant of an action, which is fitted to profiles without the model."""
    starts = round(fitted_action(step.model) / machine(step.table).kernel_seconds)
    return planned_seconds(step, starts)


MEASURED_FORWARD = 0.038
"""The seconds of the longest F in CrossPipe's runs (figure 11b)."""

_BEFORE_SLOW = 3
"""The rank before the slow link, which is between stages 4 and 5 of 8."""


def crosspipe_seconds(step: PublishedStep, waits: bool, scale: float = 1.0) -> float:
    """Return the seconds of ``step`` of CrossPipe, whose slow link delays messages as was injected.

    All costs are multiplied by ``scale``; see ``crosspipe_step``.
    """
    delay = MEASURED_FORWARD * (step.setting["latency"] + step.setting["transfer"])
    return crosspipe_step(step.schedule, step.microbatches, step.setting["recomputes"], delay, waits, scale)


@cache
def _crosspipe_work(step: PublishedStep) -> Workload:
    job = job_of(step)
    request = for_world(job, step.ranks * step.tensor)
    return Workload(job, machine(step.table), request.placement, 1)


@cache
def crosspipe_scale() -> float:
    """Return by how much the longest F that was measured is longer than the planner's."""
    step = next(step for step in steps("crosspipe-5") if step.schedule == "1F1B")
    return MEASURED_FORWARD / max(stage.forward for stage in _crosspipe_work(step).costs.stages)


@cache
def crosspipe_step(
    schedule: str, microbatches: int, recomputes: bool, delay: float, waits: bool, scale: float
) -> float:
    """Return the seconds of a step whose messages take ``delay`` seconds more on the slow link.

    With ``waits`` a rank waits until each message that it sends has arrived, and does nothing but weight
    gradients meanwhile.
    """
    step = next(
        step
        for step in steps("crosspipe-5")
        if (step.schedule, step.microbatches, step.setting["recomputes"])
        == (schedule, microbatches, recomputes)
    )
    work, timer = _crosspipe_work(step), _timer(step)

    def way(sender: int, rank: int) -> float:
        if sender == rank:
            return 0.0
        return work.hop + (delay if {sender, rank} == {_BEFORE_SLOW, _BEFORE_SLOW + 1} else 0.0)

    seconds = {action: scale * work.costs.seconds(action) for action in timer.walk.program.actions}
    if waits:
        seconds |= waiting_seconds(timer.schedule, seconds, way)
    last = last_end(timer, seconds, (lambda sender, rank: 0.0) if waits else way)
    return last + waits_around(work, timer.spans(work.costs))


type Way = Callable[[int, int], float]
"""The seconds of a message from one rank to another, which are 0 from a rank to itself."""


def waiting_seconds(schedule: Schedule, seconds: Mapping[Action, float], way: Way) -> dict[Action, float]:
    """Return the seconds of actions with the time in which their ranks wait for their messages.

    A W that comes next runs meanwhile, and only what is left of it comes after.
    """
    placement, waiting = schedule.placement, {}
    for rank, order in enumerate(schedule.orders):
        left = 0.0
        for action in order:
            if action.kind is Kind.W:
                hidden = min(left, seconds[action])
                waiting[action], left = seconds[action] - hidden, left - hidden
                continue
            receiver = action.stage + (1 if action.kind is Kind.F else -1)
            left = way(rank, placement.rank_of(receiver)) if 0 <= receiver < placement.stages else 0.0
            waiting[action] = seconds[action] + left
    return waiting


def last_end(timer: ScheduleTimer, seconds: Mapping[Action, float], way: Way) -> float:
    """Return the end of the last action, where messages take as long as their ``way``."""
    walk, placement = timer.walk, timer.schedule.placement
    actions: dict[int, Action] = {
        step: action for step, action in zip(as_list(walk.step_of)[:-1], walk.program.actions, strict=True)
    }
    ranks = {step: placement.rank_of(action.stage) for step, action in actions.items()}
    before, sends = as_list(walk.steps.before), as_list(walk.steps.sends)
    ends = [0.0] * len(before)
    for step in range(1, len(before)):
        start = ends[before[step]]
        if sends[step]:
            start = max(start, ends[sends[step]] + way(ranks[sends[step]], ranks[step]))
        ends[step] = start + seconds[actions[step]]
    return max(ends)
