"""The trainer takes the length of slices that is chosen, with all that follows from its schedule."""

import pytest

from tests.support.flags import PP4, arguments, requested_by


def test_the_schedule_settles_chunks_beside_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron builds a model of two chunks a rank, and saves the number of tokens with its flags."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    args = arguments(f"{PP4} --num-layers 8 --pipeline-schedule v-half --pipeline-slice-tokens auto")
    found = requested_by(args)
    assert found is not None and found.placement.chunks == 2
    assert args.num_virtual_stages_per_pipeline_rank == 2
    assert args.pipeline_slice_tokens == args.seq_length
