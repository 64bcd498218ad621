"""Where the schedules enter Megatron-LM.  The only package that imports megatron.

Importing this package imports nothing of Megatron; ``install`` does.
"""


def install() -> None:
    """Put the schedules into Megatron; see ``seams``.

    Ends the process with a one-line message, and Megatron untouched, if it is not one of the
    versions that the seams are known for.
    """
    from megatron_pp_ext.integration import seams

    try:
        # Importing the trainer first makes every module that holds a seam by name known.
        import megatron.training.training  # noqa: F401

        seams.apply()
    except seams.SeamError as error:
        raise SystemExit(f"megatron_pp_ext: {error}") from error
