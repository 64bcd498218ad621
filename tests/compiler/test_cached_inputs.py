"""A compiled schedule is taken from the cache for the inputs that it was compiled for, and for no others."""

import json
from dataclasses import replace

import pytest

from megatron_pp_ext.compiler import compile as compiling
from megatron_pp_ext.compiler.compile import compile_schedule
from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.placement import linear, v

STAGE = StageCosts(3, 4, 2, 2, 1)
BASE = {
    "microbatches": 3,
    "costs": Costs((STAGE,) * 4, hop=1, message=0.125),
    "memory_limit": (12.0, 12.0),
    "trials": 1,
}


def with_stage(at, **changed):
    stages = [replace(STAGE, **changed) if number == at else STAGE for number in range(4)]
    return {"costs": replace(BASE["costs"], stages=tuple(stages))}


@pytest.mark.parametrize(
    "changed",
    [
        {"microbatches": 4},
        {"trials": 2},
        {"memory_limit": (12.0, 11.0)},
        {"memory_limit": (12.0, 12.0 + 1e-9)},
        {"placements": [linear(2)]},
        {"placements": [v(2)]},
        {"costs": replace(BASE["costs"], hop=1.5)},
        {"costs": replace(BASE["costs"], hop=1 + 1e-12)},
        {"costs": replace(BASE["costs"], message=0.25)},
        with_stage(0, forward=3.5),
        with_stage(1, input_gradient=4.5),
        with_stage(2, weight_gradient=2.5),
        with_stage(3, activation=2.5),
        with_stage(3, released_by_input_gradient=0.5),
    ],
)
def test_what_was_compiled_for_other_inputs_is_not_used(changed, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_PP_EXT_CACHE", str(tmp_path))
    compile_schedule(2, **BASE)
    (notes,) = tmp_path.glob("*.json")
    notes.write_text(json.dumps(json.loads(notes.read_text()) | {"origin": "the cache"}))
    assert compile_schedule(2, **BASE).origin == "the cache"
    assert compile_schedule(2, **{**BASE, **changed}).origin != "the cache"


def test_what_another_version_compiled_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_PP_EXT_CACHE", str(tmp_path))
    compile_schedule(2, **BASE)
    monkeypatch.setattr(compiling, "VERSION", compiling.VERSION + 1)
    compile_schedule(2, **BASE)
    assert len(list(tmp_path.glob("*.json"))) == 2
