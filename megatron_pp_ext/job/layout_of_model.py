"""Whether a pipeline layout is that of the model: both state how many layers of which kinds there are."""

from collections.abc import Sequence


def require_same(layout: str, stages: Sequence[str], layers: int, mtp_layers: int) -> None:
    """Raise ValueError unless ``stages``, a letter a layer, are a model of ``layers`` and ``mtp_layers``.

    They are the flag's text ``layout``.  ``layers`` is 0 where nobody gives their number, and
    ``mtp_layers`` is the number of layers of multi-token prediction (MTP).  The rules are those of
    ``PipelineParallelLayerLayout.validate_layer_layout`` in Megatron, which hold under every placement.
    """
    letters = "".join(stages)
    has, predicting = letters.count("t"), [stage for stage in stages if "m" in stage]
    fault, fix = "", ""
    if letters[:1] != "E" or letters.count("E") > 1:
        fault, fix = "must begin with its only E, the embedding", "put one E before everything else"
    elif letters[-1:] != "L" or letters.count("L") > 1:
        fault, fix = "must end with its only L, the output layer", "put one L after everything else"
    elif layers and has != layers:
        fault, fix = (
            f"has {has} layers (t), but --num-layers is {layers}",
            f"give it {layers}, or change the latter",
        )
    elif letters.count("m") != mtp_layers:
        fault = f"has {letters.count('m')} m, but --mtp-num-layers is {mtp_layers}"
        fix = f"give it {mtp_layers}, or change the latter"
    elif "t" in letters.partition("m")[2]:
        fault, fix = "has a layer (t) after multi-token prediction (m)", "put every m after the last t"
    elif len(predicting) > 1:
        fault, fix = (
            f"has multi-token prediction (m) in {len(predicting)} stages",
            "put every m into one stage",
        )
    if fault:
        raise ValueError(f"--pipeline-model-parallel-layout {layout} {fault}; {fix}")
