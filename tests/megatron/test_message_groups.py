"""Megatron's flags for NCCL groups hold for those of a pipeline's messages."""

from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core.parallel_state import get_nccl_options

from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.megatron.requested import Pipeline, Settings
from megatron_pp_ext.megatron.runners import transport
from megatron_pp_ext.megatron.runners.transport import group_options
from megatron_pp_ext.megatron.start_up import settings
from megatron_pp_ext.runtime.groups import GroupOptions
from tests.support.flags import arguments

FILES = {
    "dp_cp: {max_ctas: 16, is_high_priority_stream: false}": GroupOptions(),
    "pp: {}": GroupOptions(),
    "pp: {min_ctas: 8}": GroupOptions(min_ctas=8, max_ctas=8),
    "pp: {min_ctas: 2, max_ctas: 3}": GroupOptions(min_ctas=2, max_ctas=3),
    "pp: {is_high_priority_stream: false, cga_cluster_size: 2, net_name: IB}": GroupOptions(
        is_high_priority_stream=False, cga_cluster_size=2, net_name="IB"
    ),
}


def run_settings(args: Namespace) -> Settings:
    """Return the settings of a run that ``args`` describe."""
    return settings(args, RequestedJob.of_args(args), Pipeline(named("1f1b", 2, 4)))


def options(flags: str = "") -> GroupOptions:
    """The options for NCCL groups under some flags."""
    return group_options(run_settings(arguments(flags)))


def test_defaults_are_ours() -> None:
    assert options() == GroupOptions(is_high_priority_stream=True, max_ctas=4)


@pytest.mark.parametrize("text", FILES)
def test_file_of_communicators(text: str, tmp_path: Path) -> None:
    file = tmp_path / "nccl.yaml"
    file.write_text(text)
    assert options(f"--nccl-communicator-config-path {file}") == FILES[text]


def test_named_groups_have_a_high_priority(tmp_path: Path) -> None:
    file = tmp_path / "nccl.yaml"
    file.write_text("pp: {is_high_priority_stream: false}")
    path = f"--nccl-communicator-config-path {file}"
    assert not options(f"{path} --high-priority-stream-groups dp_cp").is_high_priority_stream
    assert options(f"{path} --high-priority-stream-groups dp_cp pp").is_high_priority_stream


def test_messages_have_megatrons_patience_and_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """--distributed-timeout-minutes, and what a file says of NCCL, on the way to the groups."""
    file = tmp_path / "nccl.yaml"
    file.write_text("pp: {max_ctas: 16}")
    args = arguments(f"--distributed-timeout-minutes 3 --nccl-communicator-config-path {file}")
    made = []
    monkeypatch.setattr(transport, "direction_groups", lambda *given, **named: made.append((given, named)))
    transport.message_groups(run_settings(args), [1, 3], [(0, 1)])
    options = GroupOptions(max_ctas=16)
    assert made == [(([1, 3], timedelta(minutes=3)), {"options": options, "edges": [(0, 1)]})]


@pytest.mark.skipif(not dist.is_nccl_available(), reason="Megatron makes NCCL's own options")
def test_all_that_megatron_reads_is_read() -> None:
    """Whatever Megatron takes from a file for a group, ``GroupOptions`` has under the same name."""
    read_by_megatron = set()

    class Watched(dict):
        def __contains__(self, name: object) -> bool:
            read_by_megatron.add(name)
            return False

        def get(self, name: object, default: object = None) -> object:
            read_by_megatron.add(name)
            return default

    get_nccl_options("pp", {"pp": Watched()})
    assert read_by_megatron == set(GroupOptions.__slots__)


def test_messages_of_known_tokens_have_the_shapes_of_stock() -> None:
    """Under sequence parallelism the ranks share the tokens; the step's own config stays as it was."""
    config = SimpleNamespace(variable_seq_lengths=True, sequence_parallel=True, hidden_size=16)
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 2), cp=SimpleNamespace(size=lambda: 1))
    inputs: Any = SimpleNamespace(config=config, groups=groups)
    assert transport.shapes_of(inputs, [(3, 8), (3, 4096)]) == ((4, 3, 16), (2048, 3, 16))
    config.sequence_parallel = False
    assert transport.shapes_of(inputs, [(1, 8)]) == ((8, 1, 16),)
    assert config.variable_seq_lengths
