"""The flags that a CPU needs."""

import tests.support.ranks  # noqa: F401  (installs the stand-ins before Megatron is imported)

# isort: split
from megatron.core.activations import squared_relu

from megatron_pp_ext.cpu.flags import CPU_FLAGS, megatron_flags, with_cpu_flags

KNOWN = [flag[0] for flag in CPU_FLAGS]


def test_all_are_added_behind_what_was_given() -> None:
    flags = with_cpu_flags(["--lr", "1"], KNOWN)
    assert flags == ["--lr", "1", *(word for flag in CPU_FLAGS for word in flag)]
    # But for what Megatron does not know.
    assert with_cpu_flags([], ["--distributed-backend"]) == ["--distributed-backend", "gloo"]


def test_what_the_user_sets_stays() -> None:
    given = ["--transformer-impl", "inference_optimized", "--num-workers=2", "--no-rope-fusion"]
    flags = with_cpu_flags(given, KNOWN)
    assert flags[: len(given)] == given
    added = flags[len(given) :]
    assert not {"--transformer-impl", "--num-workers", "--no-rope-fusion"} & set(added)
    assert "gloo" in added


def test_the_installed_megatron_knows_them_all() -> None:
    assert set(KNOWN) <= megatron_flags()


def test_what_megatron_decorates_is_not_compiled() -> None:
    """A function that torch.compile has wrapped has the code of the wrapper."""
    assert squared_relu.__code__.co_filename.endswith("activations.py")
