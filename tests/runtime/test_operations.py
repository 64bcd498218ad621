"""An operation of one's own: the example of docs/extending.md."""

import inspect
import logging
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from megatron_pp_ext.features.pairs.runtime.operations import PairRunner
from megatron_pp_ext.runtime import plan
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.rank import Rank
from megatron_pp_ext.schedule import catalog

DOCUMENT = Path(__file__).parents[2] / "docs" / "extending.md"


def test_an_operation_that_only_logs_is_one_file_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    _, _, section = DOCUMENT.read_text().partition("## A new operation")
    file, line = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[:2]
    announcement, extended = ModuleType("announcement"), ModuleType("extended")
    exec(file, vars(announcement))
    vars(extended)["Announcement"] = vars(announcement)["Announcement"]
    begin = "        works = ["
    source = inspect.getsource(plan)
    assert source.count(begin) == 1
    exec(source.replace(begin, f"        {line}{begin}"), vars(extended))

    schedule = catalog.build("dualpipe-v", 2, 4, paired=True)
    tensor = torch.zeros(1)
    channels = SimpleNamespace(
        post=MagicMock(), send=MagicMock(), close=MagicMock(), receive=lambda peer, message: tensor
    )
    names = ("forward", "backward", "backward_input", "backward_weight")
    stage = SimpleNamespace(**dict.fromkeys(names, lambda *about: tensor))
    stages = dict.fromkeys(schedule.placement.stages_of(0), stage)
    with caplog.at_level(logging.INFO, "pipeline"):
        execute(extended.plan_rank(schedule, 0), Rank(stages, channels))
    said = [record.getMessage().split()[0] for record in caplog.records]
    assert said == [str(action) for action in schedule.orders[0]]
    channels.close.assert_called_once()


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
