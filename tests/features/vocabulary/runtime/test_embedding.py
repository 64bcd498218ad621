"""What a rank keeps of an embedding that all ranks share; its numbers are in test_part."""

import torch
import torch.distributed as dist

from megatron_pp_ext.features.vocabulary.runtime.exchanges import Exchanges, Rows, SharedEmbedding
from megatron_pp_ext.schedule.messages import Exchange, Exchanged
from tests.support.ranks import run_ranks


def _look_up(rank: int) -> list[int]:
    """Return how many microbatches' embedded tokens this rank keeps behind each lookup."""
    dist.init_process_group("gloo")
    weight, gradient = torch.ones(2, 3), torch.zeros(2, 3)
    tokens = (lambda microbatch: torch.arange(4)) if rank == 0 else None
    shape = torch.Size((4,))
    rows = Rows(2 * rank, 2, lambda: weight, gradient.add_)
    embedding = SharedEmbedding(rows, shape, torch.device("cpu"), Exchanges(dist.new_group()), 0, tokens)
    kept = []
    for microbatch in range(4):
        embedding.launch(Exchange(Exchanged.TOKENS, microbatch))
        embedding.launch(Exchange(Exchanged.EMBEDDED, microbatch))
        kept.append(sum(one.embedded is not None for one in embedding._kept.values()))
    if rank == 0:
        assert all(torch.equal(embedding.embedded(microbatch), torch.ones(4, 3)) for microbatch in range(4))
    embedding.close()
    return kept


def test_what_was_looked_up_is_given_back() -> None:
    """By the first stage when it takes it, by the others once it had time to leave."""
    first, second = run_ranks(_look_up, 2)
    assert first == [1, 2, 3, 4]
    assert second == [1, 1, 1, 1]
