"""--iterations-to-skip, beside iterators that count."""

from types import SimpleNamespace

import pytest

from megatron_pp_ext.megatron import workarounds


@pytest.mark.parametrize("iterators", [2, 1, 0])
def test_every_iterator_passes_the_samples_of_a_step(iterators: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data of all chunks of a rank is passed over once; some chunks read none, and some ranks neither."""
    runs = iter([True, False])
    machine = SimpleNamespace(should_run_forward_backward=lambda data: next(runs))
    monkeypatch.setattr(workarounds, "get_rerun_state_machine", lambda: machine)
    monkeypatch.setattr(workarounds, "get_num_microbatches", lambda: 3)
    readers = [iter(range(10)) for _ in range(iterators)]
    data = [readers[0], None, readers[1]] if iterators == 2 else readers[0] if iterators else None
    workarounds.pass_over(lambda data: pytest.fail("stock reads one iterator alone"))(data)
    assert [next(reader) for reader in readers] == [3] * iterators
