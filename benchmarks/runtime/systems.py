"""The systems that run a pipeline of sleeping stages: our executor, stock Megatron's schedules, torch's.

Each is built once in every rank and returns a function that runs one training step.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import tests.support.ranks  # noqa: F401  (installs the stand-ins for torch.cuda before Megatron is imported)

# isort: split

import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules as stock
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torchs

from benchmarks.runtime.stages import SleepingLayer, SleepingStage, Times, loss_of
from megatron_pp_ext.features.pairs.runtime import Pair
from megatron_pp_ext.runtime.channels import Channels
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.groups import direction_groups
from megatron_pp_ext.runtime.operations import Compute, Drain, Post, Receive, Send
from megatron_pp_ext.runtime.plan import RankPlan, plan_rank
from megatron_pp_ext.runtime.rank import Rank, Stage
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.costs import Costs
from megatron_pp_ext.schedule.messages import SENDS_AHEAD, Message
from tests.support.module_stage import ModuleStage

CPU = torch.device("cpu")
RunStep = Callable[[], object]


class World(NamedTuple):
    """The process groups of a rank.

    All systems share them, since each of gloo's groups has a thread that wakes up a hundred times a second.
    """

    alone: dist.ProcessGroup
    down: dist.ProcessGroup
    up: dist.ProcessGroup

    @classmethod
    def join(cls, ranks: int) -> "World":
        """Make the groups of ``ranks`` ranks; a collective call."""
        dist.init_process_group("gloo")
        alone, _ = dist.new_subgroups_by_enumeration([[other] for other in range(ranks)])
        assert isinstance(alone, dist.ProcessGroup)
        return cls(alone, *direction_groups(list(range(ranks))))

    def channels(self, times: Times) -> Channels:
        """Open channels between all ranks for one step."""
        return Channels(list(range(dist.get_world_size())), self.down, self.up, times.shape, torch.float, CPU)

    def announcing_channels(self, has_one_shape: bool) -> Channels:
        """Open channels for one step whose messages announce their shapes."""
        ranks, about = list(range(dist.get_world_size())), ((), torch.float, CPU)
        return Channels(ranks, self.down, self.up, *about, has_one_shape=has_one_shape)


class System(NamedTuple):
    """A system and the family that it runs; ``build(world, schedule, times)`` is called in every rank.

    Where it ``has_autograd``, ``times`` are shortened by what autograd takes for a layer.
    """

    name: str
    family: str
    build: Callable[[World, Schedule, Times], RunStep]
    has_autograd: bool = True


class Gloo:
    """The messages of a step as torch's process groups pass them, without our channels.

    As in the channels there is one group a direction, the plan posts the receives, and few sends are ahead.
    """

    def __init__(self, world: World, times: Times, rank: int) -> None:
        self._world, self._times, self._rank = world, times, rank
        self._posted: dict[Message, tuple[dist.Work, torch.Tensor]] = {}
        self._sending: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def post(self, peer: int, message: Message) -> None:
        """Start receiving ``message``, the next one from ``peer``, into a new tensor."""
        tensor = torch.empty(self._times.shape)
        group = self._world.down if peer < self._rank else self._world.up
        self._posted[message] = group.recv([tensor], peer, 0), tensor

    def send(self, peer: int) -> None:
        """Send a new tensor to ``peer``, and keep it until it has left."""
        tensor = torch.empty(self._times.shape)
        group = self._world.down if self._rank < peer else self._world.up
        self._sending.append((group.send([tensor], peer, 0), tensor))
        while self._sending and (len(self._sending) > SENDS_AHEAD or self._sending[0][0].is_completed()):
            self._sending.popleft()[0].wait()

    def receive(self, message: Message) -> None:
        """Wait until ``message`` is here."""
        self._posted.pop(message)[0].wait()

    def flush(self) -> None:
        """Wait until all messages have left."""
        while self._sending:
            self._sending.popleft()[0].wait()


def walk(plan: RankPlan, costs: Costs, messages: Gloo) -> None:
    """Run one step of ``plan``: sleep for each action, or for a pair of them, and pass their messages."""
    for operation in plan.operations:
        match operation:
            case Post():
                messages.post(operation.peer, operation.message)
            case Receive():
                messages.receive(operation.message)
            case Compute():
                time.sleep(costs.seconds(operation.action))
            case Pair():
                halves = (costs.seconds(half.action) for half in (operation.forward, operation.backward))
                time.sleep(costs.of_pair(*halves))
            case Send():
                messages.send(operation.peer)
            case Drain():
                messages.flush()


def gloo(world: World, schedule: Schedule, times: Times) -> RunStep:
    """Build a step of sleeping and torch's messages alone, with neither autograd nor our executor."""
    plan, costs = plan_rank(schedule, dist.get_rank()), times.costs(schedule.placement)
    return lambda: walk(plan, costs, Gloo(world, times, plan.rank))


def executor(world: World, schedule: Schedule, times: Times) -> RunStep:
    """Build a step of our executor and channels without autograd."""
    chunks, stage_numbers = schedule.placement.chunks, schedule.placement.stages_of(dist.get_rank())
    stages = {stage: SleepingStage(times, chunks) for stage in stage_numbers}
    return _execution(world, schedule, times, stages)


def ours(world: World, schedule: Schedule, times: Times) -> RunStep:
    """Build a step of our executor on ``ModuleStage``."""
    return _execution(world, schedule, times, module_stages(schedule, times))


def module_stages(
    schedule: Schedule, times: Times, layer: type[SleepingLayer] = SleepingLayer
) -> Mapping[int, Stage]:
    """Return the stages of this rank, of one ``layer`` each."""
    chunks, last = schedule.placement.chunks, schedule.placement.stages - 1
    return {
        stage: ModuleStage(
            stage,
            layer(times, chunks),
            first_inputs=(lambda _: torch.empty(times.shape)) if stage == 0 else None,
            loss=loss_of if stage == last else None,
        )
        for stage in schedule.placement.stages_of(dist.get_rank())
    }


def _execution(world: World, schedule: Schedule, times: Times, stages: Mapping[int, Stage]) -> RunStep:
    plan = plan_rank(schedule, dist.get_rank())
    # New channels for each step, as in training.
    return lambda: execute(plan, Rank(stages, world.channels(times)))


def megatrons(world: World, schedule: Schedule, times: Times) -> RunStep:
    """Build a step of stock's 1F1B or interleaved, with the overlap that Megatron's arguments choose."""
    ranks, chunks = schedule.ranks, schedule.placement.chunks
    config = TransformerConfig(
        num_layers=schedule.placement.stages,
        hidden_size=times.shape[2],
        num_attention_heads=1,
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.float,
        overlap_p2p_comm=chunks > 1,
        batch_p2p_comm=chunks == 1,
        deallocate_pipeline_outputs=True,
    )
    model: list[Any] = [SleepingLayer(times, chunks) for _ in range(chunks)]
    for number, chunk in enumerate(model):
        chunk.config, chunk.vp_stage = config, number if chunks > 1 else None
        chunk.model_type = ModelType.encoder_or_decoder

    def forward_step(_: Iterator[None], chunk: SleepingLayer) -> tuple[torch.Tensor, Callable[..., Any]]:
        input = torch.empty(times.shape) if chunk.given is None else chunk.given
        return chunk(input), lambda output: (loss_of(output), {})

    run = (
        stock.forward_backward_pipelining_with_interleaving
        if chunks > 1
        else stock.forward_backward_pipelining_without_interleaving
    )
    sequence, batch, _ = times.shape
    all_ranks = dist.group.WORLD
    return partial(
        run,
        p2p_communicator=P2PCommunicator(all_ranks, config),
        pg_collection=ProcessGroupCollection(tp=world.alone, cp=world.alone, pp=all_ranks),
        forward_step_func=forward_step,
        data_iterator=[repeat(None)] * chunks,
        model=model,
        num_microbatches=schedule.microbatches,
        seq_length=sequence,
        micro_batch_size=batch,
        forward_only=False,
    )


def of_torch(class_name: str, _: World, schedule: Schedule, times: Times) -> RunStep:
    """Build a step of a schedule class of torch.distributed.pipelining."""
    placement, rank = schedule.placement, dist.get_rank()
    stage_numbers = placement.stages_of(rank)
    stages = [
        PipelineStage(SleepingLayer(times, placement.chunks), number, placement.stages, CPU)
        for number in stage_numbers
    ]
    make = getattr(torchs, class_name)
    about = {"n_microbatches": schedule.microbatches, "loss_fn": loss_of}
    runner = make(stages[0] if placement.chunks == 1 else stages, **about)
    sequence, *other_sizes = times.shape
    batch = torch.empty(sequence * schedule.microbatches, *other_sizes)
    inputs = (batch,) if 0 in stage_numbers else ()
    targets = {"target": batch} if placement.stages - 1 in stage_numbers else {}
    return lambda: runner.step(*inputs, **targets)


ALONE = ("1f1b", "interleaved", "v-min", "v-zb")

SYSTEMS = (
    *(System(f"gloo alone, {name}", name, gloo, has_autograd=False) for name in ALONE),
    *(System(f"executor alone, {name}", name, executor, has_autograd=False) for name in ALONE),
    *(System(f"ours {name}", name, ours) for name in catalog.NAMES),
    System("Megatron 1F1B", "1f1b", megatrons),
    System("Megatron interleaved", "interleaved", megatrons),
    System("torch 1F1B", "1f1b", partial(of_torch, "Schedule1F1B")),
    System("torch interleaved", "interleaved", partial(of_torch, "ScheduleInterleaved1F1B")),
    System("torch ZBV", "v-zb", partial(of_torch, "ScheduleZBVZeroBubble")),
    System("torch DualPipeV", "dualpipe-v", partial(of_torch, "ScheduleDualPipeV")),
)
