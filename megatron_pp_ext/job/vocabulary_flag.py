"""--pipeline-vocabulary: whether all ranks of the pipeline share the embedding and the output layer."""

from argparse import Namespace

from megatron_pp_ext.job.refusals import Refusal, gathers_weights, refuse_first
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.names import AUTO, SHARED

REFUSED = (
    Refusal("--mtp-num-layers", "multi-token prediction has logits of its own"),
    Refusal("--init-model-with-meta-device", "the rows are dealt out as the model is built"),
    Refusal(
        "--tensor-parallel-num-weight-shards",
        "rows of the vocabulary would be cut twice",
        test=gathers_weights,
    ),
    Refusal("--pipeline-profile-steps", "its measurements do not tell a rank's part of the vocabulary apart"),
)


def given(args: Namespace) -> str | None:
    """Return the flag's value: ``SHARED``, ``AUTO`` or None."""
    value: str | None = getattr(args, "pipeline_vocabulary", None)
    return value


def requested(args: Namespace) -> str | None:
    """Return the flag's value, but None where other flags leave ``AUTO`` no choice."""
    value = given(args)
    is_ruled_out = any(refusal.is_set(args) for refusal in REFUSED)
    return None if value == AUTO and is_ruled_out else value


def refuse(args: Namespace) -> None:
    """Raise ValueError for flags beside which the ranks cannot share the vocabulary.

    Under ``AUTO`` such a job does not share it, unless it has no pipeline to share it in.
    """
    value = given(args)
    if value is None:
        return
    flag, schedule = f"--pipeline-vocabulary {value}", args.pipeline_schedule
    if args.pipeline_model_parallel_size < 2:
        raise ValueError(
            f"{flag} needs a pipeline of 2 ranks or more, got --pipeline-model-parallel-size "
            f"{args.pipeline_model_parallel_size}; set it to 2 or more, or leave the flag out"
        )
    if schedule is None:
        raise ValueError(
            f"{flag} has no effect under Megatron's own schedules; add --pipeline-schedule, 1f1b for example"
        )
    can = catalog.abilities(schedule)
    if not can.flushes:
        raise ValueError(
            f"{flag} does not support --pipeline-schedule {schedule}: every stage updates its weights by "
            "itself there, and the vocabulary would belong to all of them; choose a schedule that flushes, "
            "or leave the flag out"
        )
    if can.file is not None:
        raise ValueError(
            f"{flag} does not support --pipeline-schedule {schedule}: the file has no place for the parts of "
            "the vocabulary; choose a schedule by name, or leave the flag out"
        )
    if value == SHARED:
        refuse_first(args, REFUSED, by=flag)
