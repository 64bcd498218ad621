"""Profiles of layers: PipeDream's text form and our own JSON, there and back, and mistakes refused."""

import json

import pytest

from megatron_pp_ext.schedule.formats.profile import Profile, ProfiledLayer, read, read_graph_txt, write
from reference import vgg16

FIELDS = "forward_compute_time=1.5, backward_compute_time=2.5, activation_size=8.0, parameter_size=4.0"


def text(*lines: str) -> str:
    return "\n".join(line.replace("FIELDS", FIELDS) for line in lines)


def test_vgg16():
    profile = read_graph_txt(vgg16.graph_txt())
    assert [layer.name for layer in profile.layers] == [f"node{number}" for number in range(2, 42)]
    assert profile.seconds == pytest.approx(0.672535)
    assert len(profile.edges) == 40 and not profile.is_chain
    first = profile.layers[0]
    assert (first.forward_seconds, first.activation_bytes) == (pytest.approx(0.022307), 1644167168)
    assert first.kept_bytes == first.activation_bytes


def test_order_in_the_file_does_not_matter():
    profile = read_graph_txt(text("b -- B -- FIELDS", "a -- A -- FIELDS", "\ta -- b"))
    assert [layer.name for layer in profile.layers] == ["a", "b"]
    assert profile.is_chain


def test_what_is_only_data_is_left_out():
    """The inputs, and items of a tuple that nobody takes."""
    several = FIELDS.replace("8.0", "[8.0; 2.0; 1.0]")
    profile = read_graph_txt(
        text(
            "n1 -- Input0 -- FIELDS",
            f"n2 -- LSTM(1024, 1024) -- {several}",
            "n3 -- __getitem__(0) -- FIELDS",
            "n4 -- __getitem__(1) -- FIELDS",
            "n5 -- Linear -- FIELDS -- stage_id=0",
            "\tn1 -- n2",
            "\tn2 -- n3",
            "\tn2 -- n4",
            "\tn3 -- n5",
        )
    )
    assert [layer.name for layer in profile.layers] == ["n2", "n3", "n5"]
    assert profile.layers[0].activation_bytes == 11


A, B = "a -- A -- FIELDS", "b -- B -- FIELDS"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "the profile has no layers"),
        (["a -- A"], "line 1: 'a -- A' is no layer"),
        ([A, B, "  a -- b"], "'a -- b' is no layer: write 'node1 -- name"),
        ([A, B], "no edges, so that none of 2 layers reads another"),
        ([A, "\ta"], "line 2: 'a' is no edge"),
        ([A, A], "line 2: a comes twice"),
        ([A, "\ta -- b"], "the edge a -- b names 'b', but there is no such layer"),
        (["a -- A -- " + FIELDS.replace("backward", "back")], "layer 'a': backward_compute_time is missing"),
        (["a -- A -- " + FIELDS.replace("1.5", "-1.5")], "layer 'a': forward_seconds is -0.0015, but must"),
        (["a -- A -- " + FIELDS.replace("1.5", "nan")], "layer 'a': forward_seconds is nan, but must be"),
        (["a -- A -- " + FIELDS.replace("8.0", "inf")], "layer 'a': activation_bytes is inf, but must be"),
        (["a -- A -- " + FIELDS.replace("1.5", "fast")], "_time is 'fast', but must be a number"),
        (
            [f"{name} -- A -- FIELDS" for name in "abcd"] + ["\ta -- b", "\tb -- c", "\tc -- b", "\tc -- d"],
            "the layers b -- c -- b form a cycle",
        ),
        ([A, "\ta -- a"], "the layers a -- a form a cycle"),
    ],
)
def test_refusals(lines, message, tmp_path):
    file = tmp_path / "graph.txt"
    file.write_text(text(*lines))
    with pytest.raises(ValueError, match=r"graph\.txt: ") as error:
        read(file)
    assert message in str(error.value)


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
def test_refusals_of_json(content, message, tmp_path):
    file = tmp_path / "profile.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(ValueError, match=r"profile\.json: ") as error:
        read(file)
    assert message in str(error.value)
