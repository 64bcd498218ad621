"""Who runs a pipeline of sleeping stages: our executor, stock Megatron's schedules, torch's.

Each is built once in every rank and gives back a function that runs one training step.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

from megatron_pp_ext import cpu

cpu.install()  # before anything imports Megatron

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from bare import Sockets, Wires, walk  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.pipeline_parallel import schedules as stock  # noqa: E402
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from sleeping import SleepingLayer, SleepingStage, Times, loss_of  # noqa: E402
from torch.distributed.pipelining import PipelineStage  # noqa: E402
from torch.distributed.pipelining import schedules as torchs  # noqa: E402

from megatron_pp_ext.runtime.channels import Channels, direction_groups  # noqa: E402
from megatron_pp_ext.runtime.executor import Stage, execute  # noqa: E402
from megatron_pp_ext.runtime.module_stage import ModuleStage  # noqa: E402
from megatron_pp_ext.runtime.plan import RankPlan, plan_rank  # noqa: E402
from megatron_pp_ext.schedule import catalog  # noqa: E402
from megatron_pp_ext.schedule.actions import Schedule  # noqa: E402
from megatron_pp_ext.schedule.messages import SENDS_AHEAD, Message  # noqa: E402

CPU = torch.device("cpu")
RunStep = Callable[[], object]


class World(NamedTuple):
    """The process groups of a rank, and its sockets to the others.

    All systems share them: each of gloo's groups has a thread that wakes up a hundred times a second.
    """

    alone: dist.ProcessGroup
    down: dist.ProcessGroup
    up: dist.ProcessGroup
    wires: Wires

    @classmethod
    def join(cls, rank: int, ranks: int, file: str, wires: Wires) -> "World":
        """Collective: rank ``rank`` of ``ranks`` meets the others in ``file``."""
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
        alone, _ = dist.new_subgroups_by_enumeration([[other] for other in range(ranks)])
        assert isinstance(alone, dist.ProcessGroup)
        return cls(alone, *direction_groups(list(range(ranks))), wires)

    def channels[T: Channels](self, times: Times, kind: type[T]) -> T:
        """Channels of ``kind`` between all ranks, for one step."""
        return kind(list(range(dist.get_world_size())), self.down, self.up, times.shape, torch.float, CPU)


OpenChannels = Callable[[World, RankPlan, Times], Channels]


class System(NamedTuple):
    """``build(world, schedule, times)`` is called in every rank; ``schedule`` is what it should follow.

    A bare one has no autograd, so its ``times`` are not shortened by what autograd takes.
    """

    name: str
    family: str
    build: Callable[[World, Schedule, Times], RunStep]
    is_bare: bool = False


class Gloo:
    """The messages of a step as torch's process groups pass them, with nothing around them.

    One group a direction, receives where the plan posts them and few sends ahead, as our channels have them.
    """

    def __init__(self, world: World, times: Times, rank: int) -> None:
        self._world, self._times, self._rank = world, times, rank
        self._posted: dict[Message, tuple[dist.Work, torch.Tensor]] = {}
        self._sending: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def post(self, peer: int, message: Message) -> None:
        """One new tensor a message."""
        tensor = torch.empty(self._times.shape)
        group = self._world.down if peer < self._rank else self._world.up
        self._posted[message] = group.recv([tensor], peer, 0), tensor

    def send(self, peer: int) -> None:
        """One new tensor a message, kept until the message has left."""
        tensor = torch.empty(self._times.shape)
        group = self._world.down if self._rank < peer else self._world.up
        self._sending.append((group.send([tensor], peer, 0), tensor))
        while self._sending and (len(self._sending) > SENDS_AHEAD or self._sending[0][0].is_completed()):
            self._sending.popleft()[0].wait()

    def receive(self, peer: int, message: Message) -> None:
        """What was posted for it."""
        self._posted.pop(message)[0].wait()

    def flush(self) -> None:
        """Wait for what was sent."""
        while self._sending:
            self._sending.popleft()[0].wait()


def sockets(world: World, schedule: Schedule, times: Times) -> RunStep:
    """Sleeping and sockets alone."""
    plan = plan_rank(schedule, dist.get_rank())
    transport = Sockets(plan.rank, world.wires, times.message_bytes)
    return partial(walk, plan, schedule.placement.chunks, times, transport)


def gloo(world: World, schedule: Schedule, times: Times) -> RunStep:
    """Sleeping and torch's messages alone: no autograd, no executor."""
    plan = plan_rank(schedule, dist.get_rank())

    def run() -> None:
        transport = Gloo(world, times, plan.rank)
        walk(plan, schedule.placement.chunks, times, transport)
        transport.flush()

    return run


def planned(world: World, _: RankPlan, times: Times) -> Channels:
    """The channels of a step as in training: receives are where the plan posts them."""
    return world.channels(times, Channels)


def executor(world: World, schedule: Schedule, times: Times) -> RunStep:
    """Our executor and channels without autograd."""
    chunks, mine = schedule.placement.chunks, schedule.placement.stages_of(dist.get_rank())
    stages = {stage: SleepingStage(times, chunks) for stage in mine}
    return _execution(world, schedule, times, stages, planned)


def ours(world: World, schedule: Schedule, times: Times, open_channels: OpenChannels = planned) -> RunStep:
    """Our executor on ``ModuleStage``."""
    chunks, last = schedule.placement.chunks, schedule.placement.stages - 1
    stages = {
        stage: ModuleStage(
            stage,
            SleepingLayer(times, chunks),
            first_inputs=(lambda _: torch.empty(times.shape)) if stage == 0 else None,
            loss=loss_of if stage == last else None,
        )
        for stage in schedule.placement.stages_of(dist.get_rank())
    }
    return _execution(world, schedule, times, stages, open_channels)


def _execution(
    world: World,
    schedule: Schedule,
    times: Times,
    stages: Mapping[int, Stage],
    open_channels: OpenChannels,
) -> RunStep:
    """With new channels a step, as in training."""
    plan = plan_rank(schedule, dist.get_rank())
    return lambda: execute(plan, stages, open_channels(world, plan, times))


def megatrons(world: World, schedule: Schedule, times: Times) -> RunStep:
    """Stock's 1F1B or interleaved, with the overlap of messages that Megatron's arguments choose."""
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
        given = torch.empty(times.shape) if chunk.given is None else chunk.given
        return chunk(given), lambda output: (loss_of(output), {})

    run = (
        stock.forward_backward_pipelining_with_interleaving
        if chunks > 1
        else stock.forward_backward_pipelining_without_interleaving
    )
    sequence, batch, _ = times.shape
    everyone = dist.group.WORLD
    return partial(
        run,
        p2p_communicator=P2PCommunicator(everyone, config),
        pg_collection=ProcessGroupCollection(tp=world.alone, cp=world.alone, pp=everyone),
        forward_step_func=forward_step,
        data_iterator=[repeat(None)] * chunks,
        model=model,
        num_microbatches=schedule.microbatches,
        seq_length=sequence,
        micro_batch_size=batch,
        forward_only=False,
    )


def of_torch(class_name: str, _: World, schedule: Schedule, times: Times) -> RunStep:
    """A schedule class of torch.distributed.pipelining."""
    placement, rank = schedule.placement, dist.get_rank()
    mine = placement.stages_of(rank)
    stages = [
        PipelineStage(SleepingLayer(times, placement.chunks), number, placement.stages, CPU)
        for number in mine
    ]
    make = getattr(torchs, class_name)
    about = {"n_microbatches": schedule.microbatches, "loss_fn": loss_of}
    runner = make(stages[0] if placement.chunks == 1 else stages, **about)
    sequence, *rest = times.shape
    batch = torch.empty(sequence * schedule.microbatches, *rest)
    given = (batch,) if 0 in mine else ()
    wanted = {"target": batch} if placement.stages - 1 in mine else {}
    return lambda: runner.step(*given, **wanted)


BARE = ("1f1b", "interleaved", "v-min", "v-zb")

SYSTEMS = (
    *(System(f"sockets alone, {name}", name, sockets, is_bare=True) for name in BARE),
    *(System(f"gloo alone, {name}", name, gloo, is_bare=True) for name in BARE),
    *(System(f"executor alone, {name}", name, executor, is_bare=True) for name in BARE),
    *(System(f"ours {name}", name, ours) for name in catalog.NAMES),
    System("Megatron 1F1B", "1f1b", megatrons),
    System("Megatron interleaved", "interleaved", megatrons),
    System("torch 1F1B", "1f1b", partial(of_torch, "Schedule1F1B")),
    System("torch interleaved", "interleaved", partial(of_torch, "ScheduleInterleaved1F1B")),
    System("torch ZBV", "v-zb", partial(of_torch, "ScheduleZBVZeroBubble")),
    System("torch DualPipeV", "dualpipe-v", partial(of_torch, "ScheduleDualPipeV")),
)
