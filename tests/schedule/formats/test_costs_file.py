import json

import pytest

from megatron_pp_ext.schedule.costs import Costs, StageCosts
from megatron_pp_ext.schedule.formats import costs_file

TIMES = {"forward": 1.5, "input_gradient": 2, "weight_gradient": 0.25}


def written(tmp_path, content):
    path = tmp_path / "costs.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def test_everything_is_read(tmp_path):
    memory = {"activation": 8e6, "released_by_input_gradient": 2e6}
    path = written(tmp_path, {"hop": 0.125, "message": 5e5, "stages": [TIMES, TIMES | memory]})
    expected = Costs((StageCosts(1.5, 2, 0.25), StageCosts(1.5, 2, 0.25, 8e6, 2e6)), 0.125, 5e5)
    assert costs_file.read(path) == costs_file.read(path, stages=2) == expected


def test_a_hop_and_a_message_may_be_left_out(tmp_path):
    costs = costs_file.read(written(tmp_path, {"stages": [TIMES]}))
    assert (costs.hop, costs.message) == (0, 0)


def test_what_is_written_is_read(tmp_path):
    costs = Costs(
        (StageCosts(1.5, 2, 0.25), StageCosts(1.5, 2, 0.1 + 0.2, 8e6, 2e6, hidden=0.25)), 0.125, 5e5
    )
    costs_file.write(costs, tmp_path / "costs.json")
    assert costs_file.read(tmp_path / "costs.json") == costs


FINITE = ", but must be a finite number"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"{'hop': 1}", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"stages": [], "hop": 1' + b"0" * 400 + b"}", "..." + FINITE),
        ([1, 2], "it is [1, 2], but must be an object"),
        ({"hop": 1}, "'stages' is missing"),
        ({"stages": []}, "Costs.stages is empty"),
        ({"stages": {"0": TIMES}}, "must be a list"),
        ({"stages": [1]}, "stages: 0 is 1, but must be an object"),
        ({"stages": [TIMES], "hops": 1}, "'hops' is unknown: did you mean 'hop'?"),
        ({"stages": [TIMES, TIMES | {"activations": 1}]}, "stages 1: 'activations' is unknown: did you mean"),
        ({"stages": [TIMES | {"zzz": 1}]}, "stages 0: 'zzz' is unknown: known are "),
        ({"stages": [{"forward": 1}]}, "stages 0: 'input_gradient' is missing"),
        ({"stages": [TIMES | {"forward": "1"}]}, f'stages 0: forward is "1"{FINITE}'),
        ({"stages": [TIMES | {"forward": True}]}, f"stages 0: forward is true{FINITE}"),
        ({"stages": [TIMES | {"forward": None}]}, f"stages 0: forward is null{FINITE}"),
        ({"stages": [TIMES | {"forward": float("nan")}]}, f"stages 0: forward is NaN{FINITE}"),
        ({"stages": [TIMES | {"forward": 0}]}, "stages 0: StageCosts.forward is 0"),
        ({"stages": [TIMES | {"activation": -1}]}, "stages 0: StageCosts.activation is -1"),
        ({"stages": [TIMES | {"released_by_input_gradient": 2}]}, "StageCosts.released_by_input"),
        ({"stages": [TIMES], "hop": -1}, "Costs.hop is -1"),
        ({"stages": [TIMES], "hop": "1"}, f'hop is "1"{FINITE}'),
        ({"stages": [TIMES], "message": -1}, "Costs.message is -1"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else None,
)
def test_refusals(content, message, tmp_path):
    path = written(tmp_path, content)
    with pytest.raises(ValueError) as error:
        costs_file.read(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_the_number_of_stages_must_be_the_pipelines(tmp_path):
    with pytest.raises(ValueError, match="has costs for 1 stages, but there are 8"):
        costs_file.read(written(tmp_path, {"stages": [TIMES]}), stages=8)
