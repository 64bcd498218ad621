"""--overlap-moe-expert-parallel-comm beside a schedule: its forwards and backwards run in pairs."""

from argparse import Namespace
from collections.abc import Sequence

from megatron_pp_ext.job.refusals import Refusal, refuse_first
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Schedule

FLAG = "--overlap-moe-expert-parallel-comm"

REFUSED = (
    # Megatron's own conditions (TransformerConfig), which it checks only when the model is built.
    Refusal(
        "--expert-model-parallel-size 1",
        "tokens then stay on their rank, and nothing is to be hidden",
        "set it to 2 or more",
        lambda args: args.expert_model_parallel_size < 2,
    ),
    Refusal(
        "--moe-token-dispatcher-type allgather",
        "it gathers the tokens of all ranks in one piece",
        "choose alltoall or flex",
        lambda args: args.moe_token_dispatcher_type not in ("alltoall", "flex"),
    ),
    Refusal(
        "training in full precision",
        "Megatron plans its layers in half precision alone",
        "add --bf16 or --fp16",
        lambda args: not (args.bf16 or args.fp16),
    ),
    Refusal(
        "--recompute-granularity full",
        "a plan takes apart the layers that it would compute again as a whole",
        "choose selective, or leave one of the two out",
        lambda args: args.recompute_granularity == "full",
    ),
    Refusal(
        "--recompute-modules moe",
        "its tokens would have to leave twice",
        "choose others, such as core_attn",
        lambda args: "moe" in (getattr(args, "recompute_modules", None) or ()),
    ),
    Refusal("--moe-shared-expert-overlap", "a plan runs shared experts beside the attention"),
    Refusal(
        "--mtp-num-layers above 1",
        "a plan knows one prediction",
        "set it to 1",
        lambda args: (args.mtp_num_layers or 0) > 1,
    ),
    # What schedules cannot do with pairs.
    Refusal("--pipeline-vocabulary", "its exchanges have no place within a pair"),
    Refusal("--pipeline-profile-steps", "it measures forwards and backwards that run alone"),
)


def requested(args: Namespace) -> bool:
    """Whether the schedule of ``args`` is to have pairs."""
    return bool(getattr(args, "overlap_moe_expert_parallel_comm", False))


def with_pairs(args: Namespace, names: Sequence[str]) -> list[str]:
    """Return those of ``names`` that a search may run in pairs; ValueError where none is left.

    ``flex`` is left out, since training would need a file of costs.  So are the conditions on sizes, which a
    search chooses.
    """
    able = ((name, catalog.abilities(name)) for name in names)
    found = [name for name, can in able if can.has_pairs and not can.is_compiled]
    if not found:
        raise ValueError(f"{FLAG} leaves none of {', '.join(names)}: {_choice()}")
    refuse_first(args, [one for one in REFUSED if not one.flag.startswith("--expert-model")], by=FLAG)
    return found


def _choice() -> str:
    *names, last = (one for one, entry in catalog.ENTRIES.items() if entry.make_paired)
    return f"choose {', '.join(names)} or {last}, or leave the flag out"


def refuse(args: Namespace, name: str, from_file: Schedule | None = None) -> None:
    """Raise ValueError where schedule ``name`` cannot have the pairs that ``args`` request, or must not.

    ``from_file`` is the schedule where ``name`` is that of a file.
    """
    if not requested(args):
        if from_file is not None and from_file.paired:
            raise ValueError(
                f"--pipeline-schedule {name} has pairs (OVERLAP_F_B), which Megatron runs with {FLAG}; add it"
            )
        return
    if from_file is not None and not from_file.paired:
        raise ValueError(
            f"{FLAG} needs pairs, and --pipeline-schedule {name} has none; write (3F1;3B0)OVERLAP_F_B for "
            "two actions that run together, or leave the flag out"
        )
    can = catalog.abilities(name)
    if can.takes_limit and args.pipeline_costs is None:
        raise ValueError(
            f"{FLAG} with --pipeline-schedule {name} needs to know what a pair takes; give --pipeline-costs "
            'a file with a "pair", the part of the sum of its two actions, or leave the flag out'
        )
    if not can.has_pairs:
        raise ValueError(
            f"{FLAG} does not support --pipeline-schedule {name}, whose order has no pairs; {_choice()}"
        )
    refuse_first(args, REFUSED, by=FLAG)
