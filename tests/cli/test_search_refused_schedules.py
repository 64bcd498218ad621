"""Flags that schedules refuse: a search leaves out what they rule out, and prints what Megatron runs."""

import json

import pytest

from megatron_pp_ext.job.pipeline import for_world, is_permitted
from megatron_pp_ext.planner import described

DEFER = "--defer-embedding-wgrad-compute"
MODEL = (
    "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --vocab-size 32000 --bf16 "
    f"--max-position-embeddings 2048 --micro-batch-size 1 --untie-embeddings-and-output-weights {DEFER}"
)


@pytest.fixture
def search(mpp, tmp_path):
    def run(*words):
        file = tmp_path / "found.json"
        sizes = "--gpus", 8, "--global-batch-size", 16, "--layout", "even", "--json", file
        result = mpp("search", *sizes, *words, "--", *MODEL.split())
        return result, json.loads(file.read_text()) if file.exists() else None

    return run


@pytest.mark.parametrize("words", [(), ("--schedules", "all"), ("--schedules", "gpipe,1f1b,zb-h1")])
def test_megatrons_own_schedules_are_left_where_all_others_refuse_a_flag(words, search):
    """Without a pipeline Megatron refuses the flag itself."""
    result, content = search(*words)
    assert result.exit_code == 0, result.output
    every = [*content["best"], *content["frontier"]]
    assert {one["candidate"]["schedule"] for one in every} <= {"1f1b", "interleaved"}
    for one in every:
        assert DEFER in one["flags"] and "--pipeline-schedule" not in one["flags"]
        asked = described.read(one["flags"], None).job
        assert is_permitted(asked)
        request = for_world(asked, 8)
        assert request.is_stock
        assert (request.schedule, request.ranks) == (
            one["candidate"]["schedule"],
            one["candidate"]["pipeline"],
        )


def test_a_schedule_that_refuses_the_flag_alone_is_an_error_of_one_line(search):
    result, content = search("--schedules", "zb-h1,v-half")
    assert result.exit_code and content is None
    assert f"--pipeline-schedule zb-h1 does not support {DEFER}" in " ".join(result.output.split())
