"""The names that ``megatron_pp_ext`` itself offers to users of Python."""

import subprocess
import sys

import pytest

import megatron_pp_ext as api


def test_every_public_name_is_documented_and_there():
    for name in api.__all__:
        assert callable(getattr(api, name))
        assert name in api.__doc__
        assert name in dir(api)
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        api.simulat


def test_importing_the_package_imports_nothing_heavy():
    program = (
        "import sys, megatron_pp_ext; before = len(sys.modules); megatron_pp_ext.build;"
        "heavy = {'torch', 'megatron', 'matplotlib', 'numpy'} & set(sys.modules);"
        "print(sorted(heavy), before < 100)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "[] True\n"


def test_a_schedule_is_compiled_simulated_and_drawn(tmp_path):
    costs = api.Costs.per_rank(4, 2)
    published = api.simulate(api.build("v-half", 4, 8), costs)
    found = api.compile_schedule(4, 8, costs, memory_limit=3, trials=0)
    assert found.timeline.makespan <= published.makespan == 26.5
    assert max(found.timeline.peak_microbatches) <= 3
    api.draw({"published": published, "compiled": found.timeline}, tmp_path / "a.svg")
    assert "<!-- compiled -->" in (tmp_path / "a.svg").read_text()
    api.write_csv(published.schedule, tmp_path / "a.csv")
    assert api.read_csv(tmp_path / "a.csv").orders == published.schedule.orders
