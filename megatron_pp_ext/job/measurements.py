"""The flags that measure a training run: their files."""

from pathlib import Path

from megatron_pp_ext.files import require_writable


def require_files(profile: Path | None, trace: Path | None) -> None:
    """Raise ValueError for a profile or a trace that cannot be written."""
    if profile is not None and not profile.absolute().parent.is_dir():
        raise ValueError(f"--profile-pipeline {profile}: no such folder; make it first")
    for flag, path in (("--profile-pipeline", profile), ("--pipeline-trace", trace)):
        if path is not None:
            require_writable(flag, path)
