"""The flags that this package adds to Megatron's; ``job.pipeline`` gives them their meaning."""

import functools
from argparse import Action, ArgumentParser
from pathlib import Path

from megatron_pp_ext.compiler.limits import LARGEST_FRACTION
from megatron_pp_ext.job.updates import DelayCorrection
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.names import AUTO, OTHERS, SHARED

BESIDE_STOCK = (
    "--pipeline-trace",
    "--profile-pipeline",
    "--rehearse-pipeline",
    "--verify-pipeline",
    "--verify-pipeline-gradients",
    "--pipeline-layer-seeds",
)
"""The flags that mean something under Megatron's own schedules too."""


def add_flags(parser: ArgumentParser) -> ArgumentParser:
    """Add this package's flags to ``parser``, and return it."""
    group = parser.add_argument_group(title="pipeline schedules (megatron_pp_ext)")
    add_file = functools.partial(group.add_argument, metavar="FILE", type=Path)
    group.add_argument(
        "--pipeline-schedule",
        metavar="NAME",
        type=catalog.canonical,
        help=f"Pipeline schedule: {', '.join(catalog.NAMES)}, "
        + ", ".join(f"{other.name} ({other.summary})" for other in OTHERS)
        + ". Without it, Megatron's own.",
    )
    group.add_argument(
        "--pipeline-memory-limit",
        metavar="X",
        help="Memory of every pipeline rank under flex, or of each, as in 0.9-0.8. Up to "
        f"{LARGEST_FRACTION:g} it is a fraction of the activations that 1F1B keeps on its first "
        "rank, and messages come on top; a larger one is bytes, for activations and messages.",
    )
    add_file(
        "--pipeline-costs",
        help="Seconds and bytes of every stage, for flex and auto to compile from, and to predict steps. "
        "Without it, estimated from the model's arithmetic.",
    )
    group.add_argument(
        "--pipeline-vocabulary",
        choices=(SHARED, AUTO),
        help="Let every pipeline rank have an equal part of the embedding and of the output layer: "
        "always, or under auto where the predicted step is shorter for it. Without it, the first stage "
        "has the embedding and the last stage the output layer.",
    )
    group.add_argument(
        "--pipeline-offload",
        metavar="X",
        help="Let activations wait for their backward on the host: this share of them, as in 0.5, or under "
        f"{AUTO} as few as keep --pipeline-memory-limit, which any schedule then takes, and without a limit "
        "as many as cost no time. A share may make steps longer, by what the first lines say.",
    )
    group.add_argument(
        "--pipeline-offload-host-bytes",
        metavar="N",
        type=float,
        help="Bytes of the host that the activations of a rank may take. Without it, its part of half of "
        "what is free on the machine.",
    )
    add_file(
        "--pipeline-trace",
        help="Record what every pipeline rank did in the last training step into FILE, which opens "
        "in Perfetto; works for Megatron's own schedules too.",
    )
    group.add_argument(
        "--pipeline-profile-steps",
        metavar="A-B",
        help="Measure the stages in training steps A to B, compile a shorter schedule for the same "
        "placement and memory from that, and go on with it.",
    )
    add_file(
        "--profile-pipeline",
        help="Measure seconds and bytes of every layer into FILE, for `mpp partition` to read; "
        "under Megatron's own schedules.",
    )
    add_file(
        "--rehearse-pipeline",
        help="Run this pipeline rank without the others and write what its actions cost to FILE; "
        "`mpp rehearse` sets it.",
    )
    group.add_argument(
        "--verify-pipeline",
        metavar="FOLDER",
        type=Path,
        help="Record the losses and gradient norms of every step in FOLDER; `mpp verify` sets it.",
    )
    group.add_argument(
        "--verify-pipeline-gradients",
        action="store_true",
        help="Record the gradients of the first step there too.",
    )
    group.add_argument(
        "--pipeline-layer-seeds",
        action="store_true",
        help="Draw the initial weights of every layer from --seed and the layer's place in the model, so "
        "that they are the same under every schedule and number of pipeline ranks; works for Megatron's "
        "own schedules too.",
    )
    group.add_argument(
        "--pipeline-update-interval",
        metavar="K",
        type=int,
        help="Microbatches between two updates of the weights under pipedream: those of a global batch. "
        "Without it, 1, or the least common multiple of --pipeline-replicas.",
    )
    group.add_argument(
        "--pipeline-replicas",
        metavar="R-R...",
        help="Replicas of each stage under pipedream and pipedream-2bw, as in 3-1, which take the "
        "microbatches in turn; they are instead of data parallelism.",
    )
    group.add_argument(
        "--pipeline-vertical-sync",
        action="store_true",
        help="Under pipedream, let a microbatch meet the same version of the weights on all stages.",
    )
    group.add_argument(
        "--pipeline-allow-waits",
        action="store_true",
        help="Under pipedream and pipedream-2bw, allow what makes all stages wait for each other at "
        "every update: a global gradient norm, tied embeddings, fp16.",
    )
    group.add_argument(
        "--pipeline-delay-correction",
        choices=[correction.value for correction in DelayCorrection],
        help="Under pipedream and pipedream-2bw, what to do about gradients that come some updates late: "
        "compute with weights that are ahead by the delay, with any optimizer, or take Nesterov's step "
        "with adam or sgd. Without it, nothing.",
    )
    return parser


def names() -> list[str]:
    """Return the names of the arguments that this package's flags set."""
    return [action.dest for action in _actions()]


def of_schedules() -> dict[str, int]:
    """Return the flags that only a schedule needs, each with the number of words behind it."""
    numbers = {action.option_strings[0]: int(action.nargs != 0) for action in _actions()}
    return {flag: number for flag, number in numbers.items() if flag not in BESIDE_STOCK}


def _actions() -> list[Action]:
    return add_flags(ArgumentParser(add_help=False))._actions
