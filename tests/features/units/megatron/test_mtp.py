"""Multi-token prediction in slices, whose tokens, labels and divisors are those of whole microbatches."""

import inspect
import math

from tests.support import own_loop_mtp, own_process  # isort: skip  (the stand-ins come before Megatron)

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_token_prediction

from megatron_pp_ext.features.units.megatron import mtp
from megatron_pp_ext.features.units.runtime import Slice, at_work_on


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What both ranks found; see ``tests.support.own_loop_mtp``."""
    return own_process.found("own_loop_mtp", tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What both ranks found of all cases."""
    return own_process.found("own_loop_mtp", tmp_path_factory.mktemp("grid"), "wide")


def _gradients(found: list[dict], case: object, step: int) -> dict[str, torch.Tensor]:
    return {name: value for rank in found for name, value in rank[case][0].steps[step].items()}


@pytest.mark.parametrize("case", own_loop_mtp.CORE, ids=", ".join)
def test_trains_as_whole_microbatches(core: list[dict], case: tuple[str, str]) -> None:
    _assert_as_whole(core, case)


@pytest.mark.wide
@pytest.mark.parametrize(
    "case", [case for case in own_loop_mtp.cases() if case not in own_loop_mtp.CORE], ids=", ".join
)
def test_trains_as_whole_microbatches_everywhere(grid: list[dict], case: tuple[str, str]) -> None:
    _assert_as_whole(grid, case)


def test_a_slice_gets_its_part_of_what_is_rolled() -> None:
    """Whatever documents the microbatch has; of a copy of labels, too, and with the sum of all."""
    ends, total = torch.tensor([0, 4, 5, 12]), 12
    packed = PackedSeqParams("thd", ends, ends)
    whole = {"input_ids": torch.arange(1, total + 1)[None], "packed_seq_params": packed}
    stock = inspect.unwrap(multi_token_prediction.roll_tensor)
    roll, expected = mtp.roll_whole(stock), whole["input_ids"]
    units = [((0, 4), (4, 5)), ((5, 9),), ((9, 12),)]
    parts = [torch.cat([whole["input_ids"][:, begin:end] for begin, end in one], -1) for one in units]
    for part in parts:
        mtp.keep_wholes({"input_ids": part}, whole, ["input_ids", "labels"])
    for _ in range(2):
        expected, count = stock(expected, packed_seq_params=packed)
        for number, ranges in enumerate(units):
            with at_work_on(Slice(None, 0, 0, ranges, total)):
                parts[number], sum_of_all = roll(parts[number], shifts=-1, dims=-1)
            assert sum_of_all == count
        assert torch.equal(torch.cat(parts, -1), expected)
    with (
        at_work_on(Slice(None, 0, 2, ((0, 2),), total)),
        pytest.raises(ValueError, match="rolls a tensor of"),
    ):
        roll(torch.ones(1, 2))


def _assert_as_whole(found: list[dict], case: tuple[str, str]) -> None:
    """Gradients of each step are together within 1e-6 of stock's, as are losses, those of predictions too."""
    whole = own_loop_mtp.whole_of(case)
    (ours, logged, evaluated), (theirs, expected, of_whole) = found[-1][case], found[-1][whole]
    for step, count in enumerate(own_loop_mtp.COUNTS):
        assert len(ours.losses[step]) == count
        assert ours.losses[step] == pytest.approx(theirs.losses[step], rel=1e-6)
        gradients, stock = _gradients(found, case, step), _gradients(found, whole, step)
        assert gradients.keys() == stock.keys()
        assert any("mtp" in name for name in stock)
        apart = math.hypot(*((gradients[name] - stock[name]).double().norm() for name in stock))
        assert apart < 1e-6 * math.hypot(*(gradient.double().norm() for gradient in stock.values()))
    assert logged.keys() == expected.keys()
    assert all(any(values) for values in expected.values())
    for name, values in logged.items():
        assert values == pytest.approx(expected[name], rel=1e-6), name
    assert evaluated == pytest.approx(of_whole, rel=1e-6)
