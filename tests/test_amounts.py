"""Amounts of bytes with and without units."""

import pytest

from megatron_pp_ext import amounts


@pytest.mark.parametrize(
    ("given", "bytes_"),
    [
        ("60GB", 60e9),
        (" 1.5 gib ", 1.5 * 2**30),
        ("2e3KB", 2e6),
        ("3TiB", 3 * 2**40),
        ("64MB", 64e6),
        (6e10, 6e10),
        ("0", 0.0),
    ],
)
def test_units(given: float | str, bytes_: float) -> None:
    assert amounts.read(given, "--memory") == bytes_


@pytest.mark.parametrize("given", ["60G", "GB", "-1GB", "nan", "infGB", "60 GB/s", "6 0GB", ""])
def test_what_is_no_amount_is_refused_with_its_flag(given: str) -> None:
    with pytest.raises(ValueError, match=r"^--memory is .* write 60GB, 60GiB or 6e10$"):
        amounts.read(given, "--memory")


@pytest.mark.parametrize(("given", "meant"), [("60", "60GB"), ("0", "60GB"), ("0.5", "0.5GB")])
def test_a_device_of_a_few_bytes_lacks_its_unit(given: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"give a unit, as in {meant}$"):
        amounts.memory(given, "--memory")
    assert amounts.memory("1MB", "--memory") == 1e6
