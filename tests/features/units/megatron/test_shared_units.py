"""Sequences of unlike length, and packs, whose units context-parallel ranks share.

Attention here asks what Transformer Engine's asks (``own_loop_context.CheckedAttention``), also of latent
keys.  Fewer of the later tokens count, so that ranks have other numbers of them.
"""

from math import gcd
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import own_process
from tests.support.own_loop_context import COUNT, KINDS, LAYERS, QUICK, SCHEDULES, TOKENS
from tests.support.tiers import wide

Found = list[dict[Any, Any]]

CASES = [(2, *case) for case in QUICK] + [
    wide((ranks, name, kind))
    for ranks in (2, 4)
    for name in SCHEDULES
    for kind in KINDS
    if ranks == 4 or (name, kind) not in QUICK
]
"""Context-parallel ranks, schedule, and kind of data."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what all ranks found, for a case; see ``tests.support.own_loop_context``."""
    results: dict[tuple[int, bool], Found] = {}

    def of(ranks: int, *case: str) -> Found:
        key = ranks, ranks > 2 or case not in QUICK
        if key not in results:
            words = [str(ranks), *(["wide"] if key[1] else [])]
            folder: Path = tmp_path_factory.mktemp("context")
            results[key] = own_process.found("own_loop_context", folder, *words)
        return results[key]

    return of


def whole(ranks: Found, key: Any) -> torch.Tensor:
    """Return the gradients of all stages as one vector."""
    gradients: dict[str, torch.Tensor] = {}
    for rank in ranks:
        gradients |= rank[key]["gradients"]
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)]).double()


@pytest.mark.parametrize(("ranks", "name", "kind"), CASES)
def test_gradients_are_those_of_whole_sequences(found: Any, ranks: int, name: str, kind: str) -> None:
    """Of stock's schedule without context parallelism; losses are sums over the ranks' tokens."""
    results = found(ranks, name, kind)
    ours, stock = whole(results, (name, kind, ranks)), whole(results, (kind, 1))
    assert (ours - stock).norm() < 1e-6 * stock.norm()
    ends = [rank[name, kind, ranks]["losses"] for rank in results]
    losses = [torch.stack(of_rank) for of_rank in ends if of_rank]
    assert len(losses) == ranks
    torch.testing.assert_close(sum(losses), torch.stack(results[-1][kind, 1]["losses"]), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("ranks", "name", "kind"), CASES)
def test_storage_and_exchanges(found: Any, ranks: int, name: str, kind: str) -> None:
    """Each rank keeps its heads' keys and values; the bytes that it sends are those of whole sequences."""
    step = KINDS[kind].step[:COUNT]
    queries, keys, key_width, value_width = KINDS[kind].widths
    copies = ranks // gcd(keys, ranks)
    depths = KINDS[kind].depths
    cut_documents = sum(length for documents in step for length in documents if length > TOKENS)
    kept = cut_documents * keys * copies // ranks * (key_width + value_width)
    tokens = sum(map(sum, step)) // ranks
    heads = queries * (key_width + value_width) + keys * copies * (key_width + value_width)
    sent = 2 * 4 * tokens * heads  # forward and backward, in fp32
    of_all = LAYERS + depths
    results = [rank[name, kind, ranks] for rank in found(ranks, name, kind)]
    assert sum(result["kept"] for result in results) == ranks * of_all * kept
    assert sum(result["exchanged"] for result in results) == ranks * of_all * sent
    (units,) = {result["units"] for result in results}
    assert sum(result["exchanges"] for result in results) == ranks * of_all * 2 * 2 * units
