"""What happens where a model's config arrives from a process that had a schedule installed."""

from megatron_pp_ext.integration import core_seams, patching


def guard() -> None:
    """Let steps in this process ask ``chunk_pipelines.of_model``, which refuses the config.

    Nothing else is put in place, so that a schedule can still be installed here.
    """
    patching.apply(seam for seam in core_seams.STEP if seam.name == "get_forward_backward_func")
