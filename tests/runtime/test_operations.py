"""Operations as torch's profiler shows them."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from megatron_pp_ext.features.pairs.runtime import PairRunner
from megatron_pp_ext.runtime import plan
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.schedule import catalog


@pytest.mark.parametrize("runs_pairs", [False, True])
def test_torchs_profiler_shows_every_action_by_its_name(runs_pairs: bool) -> None:
    schedule = catalog.build("dualpipe-v", 2, 4, paired=True)
    tensor = torch.zeros(1)
    channels = MagicMock()
    channels.receive.return_value = tensor
    names = ("forward", "backward", "backward_input", "backward_weight")
    stage = SimpleNamespace(**dict.fromkeys(names, lambda *about: tensor))
    stages = dict.fromkeys(schedule.placement.stages_of(0), stage)
    pairs = [PairRunner(lambda *about: (tensor, tensor))] if runs_pairs else []
    rank, planned = Rank(stages, channels, parts=pairs), plan.plan_rank(schedule, 0)
    execute(planned, rank)  # without a profiler there is nothing to name
    with torch.profiler.profile() as profile:
        execute(planned, rank)
    order = [str(action) for action in schedule.orders[0]]
    shown = [name for event in profile.events() for name in event.name.split(";")]
    assert [name for name in shown if name in order] == order
