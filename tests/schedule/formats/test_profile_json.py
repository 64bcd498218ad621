"""Our own form of a profile: there and back, and mistakes refused by layer."""

import json

import pytest

from megatron_pp_ext.schedule.formats.profile import Profile, ProfiledLayer, read, write

LAYER = {
    "name": "a",
    "forward_seconds": 1,
    "backward_seconds": 2,
    "activation_bytes": 3,
    "parameter_bytes": 4,
}


@pytest.mark.parametrize("edges", [[("a", "b"), ("b", "c")], [("a", "b"), ("a", "c")]])
def test_there_and_back(edges, tmp_path):
    layers = [
        ProfiledLayer("a", 0.1, 0.2, 3, 4, 5, "E"),
        ProfiledLayer("b", 0.1, 0.0, 0, 0),
        ProfiledLayer("c", 1, 2, 3, 4, 0),
    ]
    profile = Profile.graph(layers, edges)
    write(profile, tmp_path / "profile.json")
    assert read(tmp_path / "profile.json") == profile


def test_kept_bytes_stand_in_for_what_was_not_measured():
    assert ProfiledLayer("a", 1, 1, 7, 0).kept_bytes == 7
    assert ProfiledLayer("a", 1, 1, 7, 0, saved_bytes=0).kept_bytes == 0


FINITE = ", but must be a finite number"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "profile.json: not"),
        (b'{"layers": ' + b"[" * 3000, "profile.json: not"),
        (b"\xff\xfe", "profile.json: not"),
        ({}, "'layers' is missing"),
        ({"layers": []}, "the profile has no layers"),
        ({"layers": [3]}, "layers: 0 is 3, but must be an object"),
        ({"layers": [{**LAYER, "forward": 1}]}, "layers 'a': 'forward' is unknown"),
        ({"layers": [{"name": "a"}]}, "layers 'a': 'forward_seconds' is missing"),
        ({"layers": [LAYER, {"forward_seconds": 1}]}, "layers 1: 'name' is missing"),
        ({"layers": [{**LAYER, "name": 1}]}, "name is 1, but must be a text"),
        ({"layers": [{**LAYER, "backward_seconds": "2"}]}, f'backward_seconds is "2"{FINITE}'),
        ({"layers": [{**LAYER, "backward_seconds": None}]}, f"backward_seconds is null{FINITE}"),
        ({"layers": [{**LAYER, "backward_seconds": -2}]}, f"backward_seconds is -2{FINITE}"),
        ({"layers": [{**LAYER, "parameter_bytes": float("nan")}]}, f"parameter_bytes is NaN{FINITE}"),
        ({"layers": [{**LAYER, "saved_bytes": -1}]}, "saved_bytes is -1"),
        ({"layers": [LAYER, LAYER]}, "the name 'a' comes twice"),
        ({"layers": [{**LAYER, "activation_bytes": float("inf")}]}, "activation_bytes is Infinity"),
        ({"layers": [{**LAYER, "activation_bytes": 1e19}]}, f"1e+19{FINITE} from 0 to 1e+18"),
        (
            {"layers": [{**LAYER, "forward_seconds": 0, "backward_seconds": 0}]},
            "all layers of the profile take 0 s together, but must take 1e-18 s or more",
        ),
        ({"layers": [LAYER], "edges": [["a"]]}, "edges 0: value 1 is missing: add it"),
        ({"layers": [LAYER, {**LAYER, "name": "b"}], "edges": []}, "no edges, so that none of 2 layers"),
        ({"layers": [LAYER], "edges": [["a", "z"]]}, "names 'z', but there is no such layer"),
        ({"layers": [LAYER], "edges": [["a", "a"]]}, "the layers a -- a form a cycle"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else None,
)
def test_refusals(content, message, tmp_path):
    file = tmp_path / "profile.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(ValueError, match=r"profile\.json: ") as error:
        read(file)
    assert message in str(error.value)
