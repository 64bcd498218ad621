"""An operation of one's own: the example of docs/extending.md."""

import inspect
import logging
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

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
