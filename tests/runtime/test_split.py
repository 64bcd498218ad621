"""The store of weight gradients that wait for their W."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import gelu

from megatron_pp_ext.runtime.activation_meter import ActivationMeter
from megatron_pp_ext.runtime.split import STORE, Layer, Owner, OwnPart, WeightGradientStore
from tests.support.ranks import run_ranks

ROWS, WIDTH, OUT = 3, 4, 5
SLOT = Owner(0, 0)


@pytest.fixture
def meter() -> Iterator[ActivationMeter]:
    STORE.meter = ActivationMeter()
    yield STORE.meter
    STORE.meter = None


def test_all_tensors_of_a_weight_gradient_count_until_it_ran(meter: ActivationMeter) -> None:
    """Both operands, and those of one product no longer than until it is done."""
    store = WeightGradientStore()
    store.meter = meter
    operands = [torch.randn(ROWS, width) for width in (WIDTH, OUT, WIDTH, OUT)]
    of_one = 4 * ROWS * (WIDTH + OUT)
    seen: list[int] = []

    def product(input: torch.Tensor, gradient: torch.Tensor):
        def work() -> None:
            (gradient.t() @ input).sum()
            seen.append(meter.live_bytes)

        return work

    with store.collecting(SLOT):
        for pair in (operands[:2], operands[2:]):
            store.defer(product(*pair), *pair)
    assert meter.live_bytes == 2 * of_one
    store.run(SLOT)
    # While a product runs, its own operands are alive, and those of the products before it are not.
    assert seen == [2 * of_one, of_one]
    assert (meter.live_bytes, meter.live_microbatches) == (0, 0)


def test_what_a_backward_fills_again_counts_while_a_weight_gradient_needs_it(meter: ActivationMeter) -> None:
    """The forward saved the input, and Megatron emptied it; the W has no other."""
    store = WeightGradientStore()
    store.meter = meter
    input = torch.randn(ROWS, WIDTH, requires_grad=True) * 1
    size = input.nbytes
    with meter.forward(SLOT):
        output = gelu(input)
        input.untyped_storage().resize_(0)
    assert meter.live_bytes == 0
    input.untyped_storage().resize_(size)
    with store.collecting(SLOT):
        store.defer(lambda: None, input)
    assert meter.live_bytes == size
    del output
    assert meter.live_bytes == size
    store.run(SLOT)
    assert (meter.live_bytes, meter.live_microbatches) == (0, 0)


def test_work_runs_in_its_order() -> None:
    """Sums of floating-point numbers depend on it: stock adds the gradients as its backward reaches them."""
    order: list[int] = []
    with STORE.collecting(SLOT):
        for number in range(3):
            STORE.defer(lambda number=number: order.append(number))
    STORE.run(SLOT)
    assert order == [0, 1, 2]


def test_outside_of_a_slot_work_runs_at_once() -> None:
    order: list[int] = []
    STORE.defer(lambda: order.append(0))
    assert (order, len(STORE)) == ([0], 0)


def test_gradients_that_never_ran_are_an_error() -> None:
    """Both where the step ends with them and where the same slot comes once more."""
    store = WeightGradientStore()
    with store.collecting(SLOT):
        store.defer(lambda: None)
    assert len(store) == 1
    earlier = pytest.raises(RuntimeError, match="has weight gradients from an earlier backward")
    with earlier, store.collecting(SLOT):
        pass
    within = pytest.raises(RuntimeError, match=r"cannot collect .* while")
    with store.collecting(Owner(0, 1)), within, store.collecting(Owner(1, 1)):
        pass
    with pytest.raises(KeyError):
        store.run(Owner(2, 0))


def test_a_backward_that_fails_collects_no_longer() -> None:
    store = WeightGradientStore()
    with pytest.raises(ArithmeticError), store.collecting(SLOT):
        raise ArithmeticError
    done: list[int] = []
    store.defer(lambda: done.append(0))
    assert done == [0] and not store.is_collecting


def test_work_in_parts() -> None:
    """Each part runs what came before it, in its order, and the end runs the rest and leaves nothing."""
    order: list[object] = []
    with STORE.collecting(SLOT, in_parts=True):
        for number in range(4):
            STORE.defer(lambda number=number: order.append(number))
            if number in (1, 2):
                order.append("part")
                STORE.run_part()
    assert order == ["part", 0, 1, "part", 2, 3]
    assert len(STORE) == 0
    # Neither a whole slot nor none is run in parts.
    STORE.run_part()
    with STORE.collecting(SLOT):
        STORE.defer(lambda: order.append("whole"))
        STORE.run_part()
        assert "whole" not in order
    STORE.run(SLOT)
    assert order[-1] == "whole"


def test_a_failure_leaves_no_slot_that_runs_in_parts() -> None:
    with pytest.raises(ZeroDivisionError), STORE.collecting(SLOT, in_parts=True):
        STORE.defer(lambda: None)
        raise ZeroDivisionError
    assert len(STORE) == 0
    assert not STORE.is_collecting


def test_what_a_failed_step_has_left_is_dropped_with_its_tensors(meter: ActivationMeter) -> None:
    store = WeightGradientStore()
    store.meter = meter
    for slot in (SLOT, Owner(SLOT.stage, SLOT.microbatch + 1)):
        with store.collecting(slot):
            store.defer(lambda: pytest.fail("it belongs to a step that failed"), torch.ones(8))
    assert meter.live_bytes
    store.abandon()
    assert (len(store), meter.live_bytes) == (0, 0)
    done: list[int] = []
    with store.collecting(SLOT):
        store.defer(lambda: done.append(1))
    store.run(SLOT)
    assert done == [1]


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float16)])
def test_a_weight_half_runs_under_the_autocast_of_its_backward(device, dtype, monkeypatch):
    """And leaves none behind: a whole backward restores that of its forward for both products."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    seen = []

    def work() -> None:
        is_on = torch.is_autocast_enabled(device)
        seen.append(torch.get_autocast_dtype(device) if is_on else None)

    with STORE.collecting(SLOT):
        STORE.defer(work)
        with torch.autocast(device, dtype):
            STORE.defer(work)
    STORE.run(SLOT)
    work()
    assert seen == [None, dtype, None]


class Gathered:
    """Stands in for a part whose gather is noted."""

    def __init__(self, events: list[str], name: str) -> None:
        self.events, self.name, self.is_under_way = events, name, False

    def start(self) -> None:
        if not self.is_under_way:
            self.events.append(f"gather {self.name}")
        self.is_under_way = True

    def take(self) -> None:
        self.start()
        self.is_under_way = False


def leave(events: list[str], *layers: str) -> None:
    """Defer the work of ``layers``; those that send a message have a name that begins with a capital."""
    for layer in layers:
        part = Gathered(events, layer)

        def work(layer: str = layer, part: Gathered = part) -> None:
            part.take()
            events.append(f"product {layer}")

        events.append(f"put {layer}")
        kind = Layer.SENDS if layer[0].isupper() else Layer.SENDS_NOTHING
        kind = Layer.IS_EXPERT if "expert" in layer else kind
        STORE.defer(work, parts=[part], layer=kind, is_free="tied" not in layer.lower())


def test_gathers_are_launched_before_the_two_products_before_theirs():
    """So they travel while those compute: no more than three gathered operands exist at one time."""
    events: list[str] = []
    with STORE.collecting(SLOT):
        leave(events, "a", "b", "c", "d")
    events.clear()
    STORE.run(SLOT)
    assert events == [
        "gather a", "gather b", "gather c", "product a", "gather d", "product b", "product c", "product d",
    ]  # fmt: skip


def test_messages_hide_the_products_of_another_microbatch():
    """Products of layers without a message come first; the message follows the launch of their gathers."""
    earlier, later, events = Owner(0, 0), Owner(0, 1), []
    with STORE.collecting(earlier):
        leave(events, "fc2", "Fc1", "proj", "Qkv")
    events.clear()
    with STORE.beside(earlier), STORE.collecting(later):
        leave(events, "fc2", "Fc1", "proj", "Qkv", "Tied")
    assert events == [
        "gather fc2", "put fc2", "put Fc1", "product fc2",
        "put proj", "gather proj", "put Qkv", "product proj",
        "put Tied", "gather Fc1", "product Fc1",
    ]  # fmt: skip
    events.clear()
    STORE.run(earlier)
    assert events == ["gather Qkv", "product Qkv"]
    events.clear()
    STORE.run(later)
    assert [one for one in events if "product" in one] == [
        f"product {layer}" for layer in ("fc2", "Fc1", "proj", "Qkv", "Tied")
    ]
    assert len(STORE) == 0


def test_messages_hide_products_of_the_same_microbatch():
    """Its operands stay whole until then.  What no message has hidden runs at the end."""
    events: list[str] = []
    with STORE.beside(SLOT), STORE.collecting(SLOT):
        assert STORE.runs_soon
        leave(events, "tied", "fc2", "Fc1", "proj", "Qkv", "last")
    assert [one for one in events if "gather" not in one] == [
        "put tied", "put fc2", "put Fc1", "product fc2", "put proj", "put Qkv", "product proj",
        "put last", "product last",
    ]  # fmt: skip
    events.clear()
    STORE.run(SLOT)
    assert [one for one in events if "product" in one] == ["product tied", "product Fc1", "product Qkv"]


def test_exchanges_of_tokens_hide_products_of_experts():
    earlier, later, events = Owner(0, 0), Owner(0, 1), []
    assert not STORE.hides_exchanges
    with STORE.collecting(earlier):
        leave(events, "expert fc2", "proj", "expert fc1")
    with STORE.beside(earlier), STORE.collecting(later):
        events.clear()
        for left in (2, 1, 0):
            assert STORE.hides_exchanges == (left > 0)
            STORE.hide_exchange()
    assert [one for one in events if "product" in one] == ["product expert fc2", "product expert fc1"]
    events.clear()
    STORE.run(earlier)
    STORE.run(later)
    assert [one for one in events if "product" in one] == ["product proj"]


def test_an_abandoned_step_leaves_nothing():
    events: list[str] = []
    with STORE.collecting(SLOT):
        leave(events, "a", "b")
    STORE.abandon()
    assert len(STORE) == 0
    with STORE.collecting(SLOT):
        leave(events, "a")
    STORE.run(SLOT)


GATHERED_ROWS, COLUMNS = 12, 8


def cut_and_gather(rank, dim, length):
    """The whole, its part, and what comes back; every rank has the same whole."""
    dist.init_process_group("gloo")
    whole = torch.arange(GATHERED_ROWS * COLUMNS, dtype=torch.float32).view(GATHERED_ROWS, COLUMNS)
    part = OwnPart.cut(whole, dist.group.WORLD, dim, length)
    part.start()
    part.start()  # as one that is under way already
    again = part.take()
    return whole, part.part, again, part.take()


@pytest.mark.parametrize(
    ("dim", "length"), [(0, None), (1, None), (0, 8), (1, 4)], ids=["rows", "columns", "padded", "both"]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_was_cut_comes_back_on_every_rank(ranks, dim, length):
    """Padding, which belongs to no rank, comes back as zeros."""
    divided = length or (GATHERED_ROWS, COLUMNS)[dim]
    for rank, (whole, part, *gathered) in enumerate(run_ranks(cut_and_gather, ranks, dim, length)):
        expected = torch.zeros_like(whole)
        expected.narrow(dim, 0, divided).copy_(whole.narrow(dim, 0, divided))
        assert torch.equal(part, whole.narrow(dim, 0, divided).chunk(ranks, dim)[rank])
        # A view would keep the memory of the whole.
        assert (
            part.untyped_storage().nbytes()
            == part.nbytes
            == 4 * expected.narrow(dim, 0, divided).numel() / ranks
        )
        assert all(torch.equal(again, expected) for again in gathered)
