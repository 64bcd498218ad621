"""Registries: what features and other products add to training, which imports none of them.

Whoever adds something states which pipelines it is for.  ``megatron_pp_ext.launch`` registers what the
planner and PipeDream add.
"""

from collections.abc import Callable
from dataclasses import dataclass

from megatron_pp_ext.integration.requested import Pipeline


@dataclass(frozen=True, slots=True)
class _Entry[T]:
    when: Callable[[Pipeline], bool]
    make: T


class Registry[T]:
    """What was registered for pipelines, by name.

    ``needing`` returns the flag for which a pipeline needs an entry; None where it does without.
    """

    def __init__(self, needing: Callable[[Pipeline], str | None] = lambda pipeline: None) -> None:
        self._entries: dict[str, _Entry[T]] = {}
        self._needing = needing

    def register(self, name: str, *, when: Callable[[Pipeline], bool], make: T) -> None:
        """Let ``make`` be for all pipelines of which ``when`` is true, unless an earlier one is for them.

        Whoever registers the same ``name`` again replaces what it was for.
        """
        self._entries[name] = _Entry(when, make)

    def find(self, pipeline: Pipeline) -> T | None:
        """Return what was registered for ``pipeline``; None where nothing was.

        ValueError where nothing was and ``pipeline`` needs it.
        """
        found = next((one.make for one in self._entries.values() if one.when(pipeline)), None)
        flag = self._needing(pipeline)
        if found is None and flag is not None:
            raise not_loaded(flag)
        return found


def not_loaded(flag: str) -> ValueError:
    """Return the error for a ``flag`` where the product that serves it registered nothing."""
    return ValueError(
        f"{flag} needs a part of megatron_pp_ext that is not loaded; start the script with "
        "python -m megatron_pp_ext, or let it call install of megatron_pp_ext.launch"
    )
