"""Sequences of unlike length, and packs, whose units context-parallel ranks share.

Attention here asks what Transformer Engine's asks (``own_loop_context.CheckedAttention``), also of latent
keys.  Fewer of the later tokens count, so that ranks have other numbers of them.
"""

from math import gcd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_pp_ext.features.units.megatron.context_parallel import Dealing, Parts, dealt_by, require_dealt
from megatron_pp_ext.features.units.units import cut
from megatron_pp_ext.setting_error import SettingError
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


@pytest.mark.parametrize(
    ("ranks", "name", "kind"),
    [(2, "v-half", "predictions of packs"), wide((4, "1f1b", "predictions"))],
)
def test_logged_losses_of_predictions(found: Any, ranks: int, name: str, kind: str) -> None:
    """Megatron logs their mean over the context-parallel ranks."""
    results = found(ranks, name, kind)
    logged = [rank[name, kind, ranks]["logged"] for rank in results]
    values = [of_rank for of_rank in logged if of_rank is not None]
    assert len(values) == ranks
    expected = results[-1][kind, 1]["logged"]
    assert expected.all()
    torch.testing.assert_close(sum(values) / ranks, expected, rtol=1e-5, atol=0)


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


def test_a_batch_that_divides_itself_is_refused() -> None:
    """Also one with tensors of other rows; what is whole stays whole."""
    dealing = Dealing(torch.tensor([4, 5, 0]), 6)
    with dealt_by(dealing):
        with pytest.raises(SettingError, match="has not divided among context-parallel ranks"):
            require_dealt({"labels": None, "input_ids": torch.zeros(1, 3)}, ("labels", "input_ids"))
        with pytest.raises(SettingError, match="to divide positions, of shape"):
            dealing.deal({"positions": torch.zeros(3, 1, 6)})
        mask = torch.zeros(1, 1, 6, 6)
        dealt = dealing.deal({"tokens": torch.arange(6)[None], "attention_mask": mask, "labels": None})
        assert dealt["tokens"].tolist() == [[4, 5, 0]]
        assert dealt["attention_mask"] is mask and dealt["labels"] is None
        require_dealt({"input_ids": dealt["tokens"]}, ("labels", "input_ids"))


@pytest.mark.parametrize("rank", range(2))
def test_a_rank_has_a_part_of_each_unit(rank: int) -> None:
    """A pack is divided as one, wherever its documents stand."""
    units = cut([[2, 12, 4]], 6, by="tokens", multiple=2)
    parts = Parts(units, SimpleNamespace(size=lambda: 2, rank=lambda: rank))  # type: ignore[arg-type]
    shares = [parts.share(number) for number in range(len(units))]
    slices, pack = [((2, 5), (8, 11)), ((5, 8), (11, 14))][rank], [((0, 2), (14, 15)), ((15, 18),)][rank]
    assert [share and share.places for share in shares] == [*((place,) for place in slices), pack]
    assert [share and share.ranges for share in shares] == [((0, 3),), ((3, 6),), ((6, 9),)]
    assert {share and share.total for share in shares} == {9}
