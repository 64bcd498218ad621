"""Copies to the host are a part of a schedule: its digest has them, and ``check`` proves them."""

from dataclasses import replace

import pytest

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Copies
from megatron_pp_ext.schedule.check import check
from tests.schedule.test_check import parse, refusal

WHOLE = catalog.build("1f1b", 4, 6)
HALVED = catalog.build("v-half", 4, 6)


def away(schedule, **back):
    """Return ``schedule`` with copies, given as s0m1="0F3": stage 0, microbatch 1, back before 0F3."""
    keys = (tuple(map(int, key[1:].split("m"))) for key in back)
    return replace(schedule, copies=Copies(dict(zip(keys, map(parse, back.values()), strict=True))))


def test_copies_between_forward_and_backward_pass():
    check(away(WHOLE, s0m1="0F3", s3m5="3B5"))
    check(away(HALVED, s0m1="0I1"))


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        ({"s4m0": "0B0"}, "stage 4 and microbatch 0 are copied to the host, stages are 0..3 and"),
        ({"s0m6": "0B0"}, "stage 0 and microbatch 6 are copied to the host, stages are 0..3 and"),
        ({"s0m1": "1B1"}, "rank 0: 0F1 is reloaded before 1B1, which the rank does not do"),
        ({"s0m1": "0F1"}, "rank 0: 0F1 is reloaded before 0F1, which does not stand between it and 0B1"),
        ({"s0m1": "0B2"}, "rank 0: 0F1 is reloaded before 0B2, which does not stand between it and 0B1"),
    ],
)
def test_other_copies_are_refused(copies, message):
    assert message in refusal(away(WHOLE, **copies))


def test_memory_is_given_up_between_forward_and_copy_back():
    back = {(0, 1): parse("0F4")}
    check(replace(WHOLE, copies=Copies(back, {(0, 1): parse("0F3")})))
    wrong = replace(WHOLE, copies=Copies(back, {(0, 1): parse("0F5")}))
    assert "rank 0: 0F1 is freed before 0F5, which does not stand between it and 0F4" in refusal(wrong)
    launches = [(action,) for action in WHOLE.orders[0]]
    assert Copies(back, {(0, 1): parse("0F2")}).freed_before(launches) == {parse("0F2"): [(0, 1)]}
    assert Copies(back).freed_before(launches) == {parse("0F3"): [(0, 1)]}


def test_a_copy_is_not_launched_within_a_pair():
    paired = catalog.build("1f1b", 4, 6, paired=True)
    first = min(paired.paired)
    order = paired.orders[first.stage]
    behind = order[order.index(first) + 1]
    found = replace(paired, copies=Copies({(behind.stage, behind.microbatch): behind}))
    assert refusal(found).endswith(f"before {behind}, the second of a pair: choose the first, {first}")
    check(replace(found, copies=Copies({(behind.stage, behind.microbatch): first})))


def test_an_evaluation_copies_nothing():
    evaluation = catalog.forward_only(WHOLE.placement, 2)
    assert "rank 0: 0F1 is copied to the host, but has no backward" in refusal(away(evaluation, s0m1="0F1"))


def test_the_digest_has_the_copies_in_any_order():
    one, other = away(WHOLE, s0m1="0F3", s1m1="1B1"), away(WHOLE, s1m1="1B1", s0m1="0F3")
    assert one.digest == other.digest
    assert len({one.digest, WHOLE.digest, away(WHOLE, s0m1="0F4").digest}) == 3


def test_halved_backwards_keep_their_copies():
    halved = away(WHOLE, s0m1="0B1", s1m1="1F2").with_halved_backwards
    check(halved)
    assert halved.copies == Copies({(0, 1): parse("0I1"), (1, 1): parse("1F2")})


def test_copies_before_one_action_are_launched_in_the_order_of_their_backwards():
    found = away(WHOLE, s0m2="0F4", s0m1="0F4", s0m3="0F5")
    launched = found.copies.reloaded_before(found.orders[0])
    assert launched == {parse("0F4"): [(0, 1), (0, 2)], parse("0F5"): [(0, 3)]}
