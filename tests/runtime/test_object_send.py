"""Trees of tensors arrive as they were sent, in one message each while their form stays the same."""

import json
import pickle
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_pp_ext.runtime.object_send import ObjectSend, TensorPlace, pack, unpack
from tests.support.ranks import run_ranks

LOSS = torch.tensor([1.5, 7.0])
TREES = [
    [{"lm loss": LOSS}, {"lm loss": 2 * LOSS}],
    [{"lm loss": 3 * LOSS}, {"lm loss": float("nan") * LOSS}],
    # Sizes that do not begin at multiples of eight, a transposed matrix, a scalar, no elements, no tensor.
    ([torch.tensor(True), torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t()], {"n": torch.tensor(3)}),
    ([], {"empty": torch.zeros(0), "no tensor": 7, "long": torch.tensor(2**40)}),
    [],
    [],
]
MESSAGES = [2, 1, 2, 2, 2, 1]
"""One for the form where it is another one, and one for the numbers."""


SAME_LENGTH = [{"lm loss": LOSS}, {"mm loss": LOSS}, {"mm loss": LOSS.flip(0)}]
"""Names of as many letters, as of two auxiliary losses."""


def exchange(rank: int, trees: list) -> tuple[list, list[int]]:
    dist.init_process_group("gloo")
    connection = ObjectSend(0, 1, dist.group.WORLD, torch.device("cpu"))
    counts, send, receive = [], dist.send, dist.recv

    def counted(call):
        def call_and_count(*args, **kwargs):
            counts[-1] += 1
            return call(*args, **kwargs)

        return call_and_count

    dist.send, dist.recv = counted(send), counted(receive)
    got = []
    for tree in trees:
        counts.append(0)
        try:
            got.append(connection.send(tree=tree) if rank == 0 else connection.receive()["tree"])
        except ValueError as error:
            got.append(str(error))
    return got, counts


def test_trees_arrive() -> None:
    (_, sent), (got, received) = run_ranks(exchange, 2, TREES)
    assert sent == received == MESSAGES
    for tree, arrived in zip(TREES, got, strict=True):
        torch.testing.assert_close(arrived, tree, rtol=0, atol=0, equal_nan=True)


def test_a_form_of_the_same_length_is_another() -> None:
    _, (got, _) = run_ranks(exchange, 2, SAME_LENGTH)
    torch.testing.assert_close(got, SAME_LENGTH, rtol=0, atol=0)


def test_what_cannot_travel_ends_both_ends_with_its_name() -> None:
    """Neither waits for the other, and what comes behind it arrives."""
    trees = [*SAME_LENGTH[:1], [{"mm loss": LOSS}, {"note": [LOSS, lambda: LOSS]}], *SAME_LENGTH[:2]]
    (ended, sent), (got, received) = run_ranks(exchange, 2, trees)
    assert sent == received
    assert ended[1] == got[1]
    assert ended[1].startswith("tree[1]['note'][1] cannot be copied (")
    assert "has to go from rank 0, which computes it, to rank 1" in ended[1]
    assert "let the loss function return tensors, numbers, texts, and lists, tuples or dicts" in ended[1]
    torch.testing.assert_close([got[0], *got[2:]], [trees[0], *trees[2:]], rtol=0, atol=0)


def test_jagged_tensors_arrive_and_cost_a_message_while_their_lengths_stay() -> None:
    first, second = (
        torch.nested.nested_tensor([LOSS, scale * LOSS], layout=torch.jagged) for scale in (2.0, 3.0)
    )
    longer = torch.nested.nested_tensor([LOSS, LOSS.repeat(2)], layout=torch.jagged)
    trees = [[{"rewards": one}] for one in (first, second, longer)]
    _, (got, counts) = run_ranks(exchange, 2, trees)
    for tree, arrived in zip(trees, got, strict=True):
        torch.testing.assert_close(list(arrived[0]["rewards"]), list(tree[0]["rewards"]), rtol=0, atol=0)
    assert counts == [2, 1, 2]


NUMBERS = torch.tensor([[1.5, float("nan"), -0.0], [2.0, 3.0, 4.0]])
LENGTHS = [torch.arange(3.0), torch.arange(5.0)]


@dataclass
class Rollout:
    reward: torch.Tensor
    length: int


class Marked(torch.Tensor):
    pass


def there_and_back(tree: Any) -> Any:
    """Pack ``tree`` and unpack it with copies of its plain tensors alone, whose places follow each other."""
    form, placed = pack(tree)
    ends = [0, *(place.end for place, _ in placed)]
    assert [place.start for place, _ in placed] == ends[:-1]
    assert all(place.end - place.start == tensor.nbytes for place, tensor in placed)
    copies = {place: tensor.detach().clone() for place, tensor in placed}
    return unpack(form, copies.__getitem__)


TENSORS = {
    "transposed": lambda: NUMBERS.t(),
    "expanded": lambda: NUMBERS[:, :1].expand(2, 4),
    "with a graph": lambda: 2 * NUMBERS.clone().requires_grad_(),
    "parameter": lambda: torch.nn.Parameter(NUMBERS),
    "jagged": lambda: torch.nested.nested_tensor(LENGTHS, layout=torch.jagged),
    "jagged with a graph": lambda: (
        2 * torch.nested.nested_tensor(LENGTHS, layout=torch.jagged).requires_grad_()
    ),
    "jagged with holes": lambda: torch.nested.nested_tensor_from_jagged(
        torch.arange(8.0), torch.tensor([0, 3, 8]), lengths=torch.tensor([2, 4])
    ),
    "nested": lambda: torch.nested.nested_tensor(LENGTHS, layout=torch.strided),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.qint8),
    "quantized by channel": lambda: torch.quantize_per_channel(
        NUMBERS.nan_to_num(), torch.tensor([0.5, 0.25]), torch.tensor([0, 1]), 0, torch.qint8
    ),
    "conjugate": lambda: NUMBERS.to(torch.complex64).conj().imag,
    "float8": lambda: NUMBERS.to(torch.float8_e4m3fn).t(),
}


@pytest.mark.filterwarnings("ignore")  # several of these kinds are in beta, or on their way out
@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_of_every_kind(kind: str) -> None:
    tensor = TENSORS[kind]()
    back = there_and_back({"loss": tensor})["loss"]
    assert (type(back), back.dtype, back.layout) == (type(tensor), tensor.dtype, tensor.layout)
    for mine, theirs in zip(parts(back), parts(tensor), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Plain tensors with all the numbers of ``tensor``."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.is_quantized:
        return [tensor.int_repr(), tensor.dequantize()]
    return [tensor.to_dense().as_subclass(torch.Tensor).float()]


def test_containers_and_what_is_no_tensor() -> None:
    tree = [
        {
            "lm loss": torch.ones(1),
            3: None,
            "text": "a \u00e4 \ud800",
            ("a", 2): True,
            "b": b"\0a",
            "big": 2**80,
        },
        (OrderedDict(a=torch.ones(1)), deque([torch.zeros(1)]), {1, 2}, frozenset("a"), torch.Size([2])),
        [torch.bfloat16, 1 + 2j, float("inf"), np.float32(0.1), np.int64(7), np.bool_(True), [], ()],
    ]
    back = there_and_back([*tree, {"numbers": np.arange(6.0).reshape(2, 3).T, "none": np.zeros(0, np.int8)}])
    np.testing.assert_array_equal(back[3]["numbers"], np.arange(6.0).reshape(2, 3).T)
    assert back[3]["none"].dtype == np.int8
    assert back[:3] == tree
    for mine, theirs in zip(back[1:3], tree[1:], strict=True):
        assert [type(one) for one in mine] == [type(one) for one in theirs]


def test_a_form_says_nothing_of_the_numbers() -> None:
    """So the form of losses stays the same from step to step, whatever they are."""
    assert pack({"lm loss": torch.ones(2)})[0] == pack({"lm loss": torch.zeros(2)})[0]
    assert pack({"lm loss": torch.ones(2)})[0] != pack({"lm loss": torch.ones(2).double()})[0]


def test_a_part_of_a_large_tensor_travels_alone() -> None:
    _, placed = pack(torch.zeros(1000)[:2])
    assert placed[0][0].end == 8


def test_a_tensor_that_is_there_twice_stays_one() -> None:
    """Jagged tensors can be added where their offsets are one tensor."""
    first = torch.nested.nested_tensor(LENGTHS, layout=torch.jagged)
    one, other = there_and_back([first, 2 * first])
    torch.testing.assert_close((one + other).values(), 3 * first.values(), rtol=0, atol=0)
    assert len(pack([LENGTHS[0], LENGTHS[0]])[1]) == 1


def test_attributes_of_a_tensor_travel() -> None:
    tensor = NUMBERS.clone()
    tensor.note = LENGTHS[0]
    back = there_and_back(tensor)
    torch.testing.assert_close(back, NUMBERS, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(back.note, tensor.note)


def test_a_defaultdict_keeps_its_contents_and_a_factory_of_python_s_own() -> None:
    unnamed = defaultdict(lambda: torch.zeros(1), a=torch.ones(1))
    unnamed["inner"] = defaultdict(float, b=2)
    back = there_and_back([unnamed, defaultdict(list, a=[1])])
    assert back == [{"a": torch.ones(1), "inner": {"b": 2}}, {"a": [1]}]
    assert [type(one) for one in back] == [defaultdict, defaultdict]
    assert [one.default_factory for one in (*back, back[0]["inner"])] == [None, list, float]


@pytest.mark.parametrize(
    ("path", "culprit", "why"),
    [
        ("[0]['a']", lambda: Rollout(torch.ones(1), 1), "it is of type Rollout"),
        ("[0]['a'][1]", lambda: (1, lambda: 0), "it is of type function"),
        ("[0]['a']", lambda: NUMBERS.as_subclass(Marked), "it is of type Marked"),
        ("[0]['a']['b'].note", lambda: {"b": marked(note=object())}, "it is of type object"),
        ("[0]['a']", lambda: np.array(["text"]), "it is of type ndarray"),
        ("[0]['a']", lambda: torch.ones(2).to_mkldnn(), "it is of type Tensor"),
    ],
)
def test_what_a_form_has_no_name_for_is_named(path: str, culprit: Any, why: str) -> None:
    with pytest.raises(ValueError) as error:
        pack([{"lm loss": torch.ones(1), "a": culprit()}, {"a": lambda: 0}], "losses")
    assert str(error.value) == f"losses{path} cannot be copied ({why})"


def marked(**attributes: Any) -> torch.Tensor:
    tensor = torch.ones(1)
    vars(tensor).update(attributes)
    return tensor


def test_a_circle_is_named() -> None:
    losses: list[Any] = [{}]
    losses[0]["whole"] = losses
    with pytest.raises(ValueError, match=r"^losses\[0\]\['whole'\] cannot be copied \(it contains itself\)$"):
        pack(losses, "losses")


class Harmful:
    """Runs code where its pickle is read."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("code of another rank was run",)


@pytest.mark.parametrize(
    "form",
    [
        pickle.dumps(Harmful()),
        b"",
        b"[",
        b'["eval","1"]',
        b'["dtype","torch.load"]',
        b'["number","|O",1,2]',
        b'["tensor"]',
        b'["defaultdict"]',
        json.dumps(["quantized", ["list"], 1.0, 0]).encode(),
    ],
)
def test_bytes_that_are_no_form_run_nothing(form: bytes) -> None:
    with pytest.raises(ValueError):
        unpack(form, lambda place: torch.ones(1))


def test_only_a_tensor_that_needs_no_numbers_leaves_none() -> None:
    _, placed = pack([torch.empty(3, device="meta"), torch.zeros(0)])
    assert placed == [(TensorPlace(torch.float32, torch.Size([0]), 0, 0, True), placed[0][1])]
