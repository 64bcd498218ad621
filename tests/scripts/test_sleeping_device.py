"""The device that sleeps, on which benchmarks measure what exchanges hide."""

import pytest

import tests.support.ranks  # noqa: F401  (installs the stand-ins for torch.cuda before Megatron is imported)

# isort: split
from benchmarks.runtime import device, expert_layers


class Clock:
    """A clock that only sleeping moves."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(device, "time", clock)
    monkeypatch.setattr(device, "_all", [])
    return clock


def test_streams_run_beside_each_other_and_wait_for_events(clock: Clock) -> None:
    compute, exchanges, ready = device.Stream(), device.Stream(), device.Event()
    with device.on_stream(compute):
        device.current_stream().run(2)
        ready.record()
        device.current_stream().run(3)
    ready.wait(exchanges)
    exchanges.run(1)
    assert (compute.free_at, exchanges.free_at) == (5, 3)
    assert clock.now == 0
    ready.synchronize()
    assert clock.now == 2
    compute.wait_stream(exchanges)
    assert compute.free_at == 5
    device.synchronize()
    assert clock.now == 5


def test_work_begins_no_sooner_than_it_is_launched(clock: Clock) -> None:
    stream = device.Stream()
    stream.run(1)
    clock.sleep(4)
    assert stream.query()
    stream.run(1)
    assert stream.free_at == 5


@pytest.mark.parametrize("share", expert_layers.SHARES)
def test_a_pair_hides_all_exchanges_and_computes_as_much(share: float) -> None:
    """No exchange is longer than the computation beside it, so that a pair takes what is left."""
    of_stages = expert_layers.costs(expert_layers.Times.of(share), 2)
    assert of_stages.pair == pytest.approx(1 - share)
    (stage, *_) = of_stages.stages
    together = of_stages.of_pair(stage.forward, stage.input_gradient + stage.weight_gradient)
    products = 3 * (expert_layers.AROUND_ATTENTION + expert_layers.OF_EXPERTS) * expert_layers.PRODUCT
    assert together == pytest.approx(products)
