"""A line at the start of a run about its differences from one under 1F1B."""

from argparse import Namespace

from megatron_pp_ext.integration.requested import Pipeline
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.placement import Shape


def caveat(pipeline: Pipeline, args: Namespace) -> str:
    """Return why this run differs from one under 1F1B, as two seeds do; empty where it does not.

    Megatron seeds initial weights and dropout by pipeline rank, so both follow the placement of the layers.
    ``args`` are the flags of a run whose checkpoint is loaded, if it has one.
    """
    if pipeline.source is None or pipeline.placement.shape is Shape.LINEAR:
        return ""
    is_loaded = args.iteration > 0 or (args.load and args.finetune)
    is_loaded = is_loaded or getattr(args, "pretrained_checkpoint", None)
    follow = []
    if not is_loaded and not args.pipeline_layer_seeds:
        follow.append("initial weights")
    if args.attention_dropout > 0 or args.hidden_dropout > 0:
        follow.append("dropout")
    if not follow:
        return ""
    fix = {
        "initial weights": "start from one checkpoint, or add --pipeline-layer-seeds to all runs",
        "dropout": "turn dropout off",
    }
    verb = "follow" if follow != ["dropout"] else "follows"
    text = (
        f"{' and '.join(follow).capitalize()} {verb} the placement of layers: this run differs from one "
        "under 1F1B as two seeds do.\n"
        f"To make losses equal, {', and '.join(fix[effect] for effect in follow)}."
    )
    if "dropout" in follow and (measured_by := _measured_by(pipeline)):
        text += (
            f"\nUnder {measured_by} the order of a rank's chunks goes by measurements, and dropout by that "
            "order: losses change with the schedule, and two runs with one seed may differ."
        )
    return text


def _measured_by(pipeline: Pipeline) -> str | None:
    """Return the flag by which the schedule changes during the run; None where it stays as it is."""
    for option in pipeline.request.options:
        if option.measured_by:
            return option.measured_by
    assert pipeline.source is not None
    name = pipeline.source.name
    return f"--pipeline-schedule {name}" if catalog.abilities(name).measures_memory else None
