"""Lines that a job says once."""

import pytest
import torch.distributed as dist

from megatron_pp_ext.runtime.rank import print_rank_0


@pytest.mark.parametrize(("rank", "said"), [(None, "a line\n"), (0, "a line\n"), (1, "")])
def test_the_first_rank_speaks_and_a_process_that_is_none(rank, said, monkeypatch, capsys):
    monkeypatch.setattr(dist, "is_initialized", lambda: rank is not None)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    print_rank_0("a line")
    assert capsys.readouterr().out == said
