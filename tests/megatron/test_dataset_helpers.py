"""The dataset helpers, which are built by Megatron's own make where this Python has none."""

import sys

import pytest

from megatron_pp_ext.megatron.workarounds import skip_if_built


@pytest.mark.parametrize("is_built", [True, False])
def test_make_runs_where_there_are_none(is_built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_built:
        monkeypatch.setitem(sys.modules, "megatron.core.datasets.helpers_cpp", None)
    runs: list[str] = []
    skip_if_built(lambda: runs.append("make"))()
    assert runs == ([] if is_built else ["make"])
