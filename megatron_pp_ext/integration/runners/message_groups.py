"""What Megatron's flags say about the process groups of a pipeline's messages."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.training import get_args

from megatron_pp_ext.runtime.groups import MAX_CTAS, GroupOptions, direction_groups

OURS = "pp"
"""What Megatron's flags and files call the groups whose messages ours carry."""


def message_groups(group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The groups, down and up, for messages between the ranks of the pipeline ``group``.

    Collective over the whole world, at a time when no message is on its way.
    """
    args = get_args()
    patience = timedelta(minutes=args.distributed_timeout_minutes)
    return direction_groups(dist.get_process_group_ranks(group), patience, options=group_options(args))


def group_options(args: Any) -> GroupOptions:
    """What NCCL is asked for: what the user says of Megatron's own pipeline groups, else our defaults.

    As in Megatron (``parallel_state.initialize_model_parallel``), a group that is named in
    ``--high-priority-stream-groups`` has a high priority whatever the file of
    ``--nccl-communicator-config-path`` says.
    """
    said = _said_in_file(args.nccl_communicator_config_path)
    if OURS in (args.high_priority_stream_groups or ()):
        said["is_high_priority_stream"] = True
    if "min_ctas" in said:
        said.setdefault("max_ctas", max(MAX_CTAS, said["min_ctas"]))
    return GroupOptions(**{name: said[name] for name in GroupOptions.__slots__ if name in said})


def _said_in_file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    import yaml  # type: ignore[import-untyped]  # as in Megatron, only where there is such a file

    return dict(yaml.safe_load(Path(path).read_text()).get(OURS) or {})
