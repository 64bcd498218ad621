"""The places where schedules enter Megatron-LM.

Apart from ``cpu`` and the entry points, only this package imports Megatron; importing the package itself
imports nothing of it, ``install`` does.
"""


def install(cpu: bool = False) -> None:
    """Put the schedules into Megatron, with ``cpu`` also stubs for a machine without a GPU; see ``hooks``.

    End the process with a one-line message, and Megatron untouched, if a hook does not fit or the release is
    not in the table of ``releases``.
    """
    from megatron_pp_ext.megatron import patching

    try:
        # This comes before the trainer is imported: a Megatron that is too old or too new may not have it.
        patching.require_known_release(by_flags=True)
        # Importing the trainer imports every module that holds a patched name.
        import megatron.training.training  # noqa: F401

        from megatron_pp_ext.megatron import hooks

        patching.apply(hooks.all_hooks(cpu))
    except patching.HookError as error:
        raise SystemExit(f"megatron_pp_ext: {error}") from error
