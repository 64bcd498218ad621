"""--overlap-moe-expert-parallel-comm beside a schedule: its forwards and backwards run in pairs."""

from argparse import Namespace

from megatron_pp_ext.request.refusals import Refusal, refuse_first
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.names import CSV_PREFIX, OTHERS
from megatron_pp_ext.schedule.placement import Placement

FLAG = "--overlap-moe-expert-parallel-comm"

REFUSED = (
    Refusal("--pipeline-vocabulary", "its exchanges have no place within a pair"),
    Refusal("--pipeline-profile-steps", "it measures forwards and backwards that run alone"),
    Refusal("--rehearse-pipeline", "a rank alone has nobody to exchange tokens with"),
)


def requested(args: Namespace) -> bool:
    """Whether the schedule of ``args`` is to have pairs."""
    return bool(getattr(args, "overlap_moe_expert_parallel_comm", False))


def refuse(args: Namespace, name: str, placement: Placement, from_file: Schedule | None) -> None:
    """Raise ValueError where the schedule ``name`` cannot have the pairs that ``args`` request, or must not.

    Megatron plans its layers only where a rank has several chunks (``TransformerConfig``).
    """
    if not requested(args):
        if from_file is not None and from_file.paired:
            raise ValueError(
                f"--pipeline-schedule {name} has pairs (OVERLAP_F_B), which Megatron runs with {FLAG}; add it"
            )
        return
    refuse_first(args, REFUSED, by=FLAG)
    if name in {other.name for other in OTHERS}:
        raise ValueError(
            f"{FLAG} does not support --pipeline-schedule {name}, whose order has no pairs; {_others()}"
        )
    if name.startswith(CSV_PREFIX):
        if from_file is not None and not from_file.paired:
            raise ValueError(
                f"{FLAG} needs pairs, and --pipeline-schedule {name} has none; write (3F1;3B0)OVERLAP_F_B "
                "for two actions that run together, or leave the flag out"
            )
        return
    if catalog.entry(name).make_paired is None:
        raise ValueError(
            f"{FLAG} does not support --pipeline-schedule {name}, whose order has no pairs; {_others()}"
        )
    if placement.chunks == 1:
        raise ValueError(
            f"{FLAG} does not support --pipeline-schedule {name}: Megatron plans its layers only where a "
            f"rank has several chunks; {_others()}"
        )


def _others() -> str:
    names = [name for name, entry in catalog.ENTRIES.items() if entry.make_paired and entry.chunks > 1]
    return f"choose {' or '.join(names)}, or leave the flag out"
