"""How many layers a model has, and how they spread over pipeline stages where nothing else is said."""

from argparse import Namespace


def pattern(args: Namespace) -> str | None:
    """The layers of --hybrid-layer-pattern, a letter each, and its | between stages; None without one.

    What follows a slash is multi-token prediction, which goes with the last stage.
    """
    given = args.hybrid_layer_pattern or args.hybrid_override_pattern
    return given.partition("/")[0] if given else None


def count(args: Namespace) -> int:
    """How many layers the model has; 0 where the flags do not tell."""
    letters = pattern(args)
    return len(letters.replace("|", "")) if letters else int(args.num_layers or 0)


def spread(args: Namespace) -> int:
    """How many layers are spread over the stages, the ends counted where they take a layer's place."""
    ends = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    return int(count(args) + ends)


def evenly(args: Namespace, stages: int) -> list[int]:
    """How many layers each of ``stages`` stages has; ValueError where they do not fill them."""
    each, left = divmod(spread(args), stages)
    if left:
        ends = spread(args) - count(args)
        below, above = each * stages - ends, (each + 1) * stages - ends
        nearest = f"{below} or {above}" if below > 0 else f"{above}"
        raise ValueError(
            f"--num-layers {count(args)} does not fill them evenly; set it to {nearest}, or describe uneven "
            "stages with --pipeline-model-parallel-layout"
        )
    even = [each] * stages
    even[0] -= args.account_for_embedding_in_pipeline_split
    even[-1] -= args.account_for_loss_in_pipeline_split
    return even
