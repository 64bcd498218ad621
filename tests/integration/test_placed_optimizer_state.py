"""State of a distributed optimizer that is saved rank by rank, for models that are built by a call."""

import pytest

from megatron_pp_ext import cpu
from tests.support.own_loop_checkpoints import BY_WEIGHT, FIRST, PAIRS, SHARED_KEYS, exchanged
from tests.support.ranks import run_ranks


def on_rank(rank: int, folder: str) -> dict:
    from tests.support import own_loop

    cpu.fork_checkpoint_writers(["--save", folder])
    own_loop.start()
    return exchanged(folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What both ranks found; see ``own_loop_checkpoints``."""
    return run_ranks(on_rank, 2, str(tmp_path_factory.mktemp("checkpoints")))


@pytest.mark.parametrize(("form", "name", "other"), PAIRS)
def test_it_loads_under_the_placement_that_it_was_saved_under(found, form, name, other) -> None:
    """State that goes by weight loads anywhere."""
    v, stock = "v placement with 2 chunk(s) on each of 2 ranks", "Megatron's own placement"
    last = f"{v} and both ends of the model on the last one"
    before, now = (
        stock if not one.startswith("v-") else v if one.endswith(FIRST) else last for one in (name, other)
    )
    for rank in found:
        line = rank[form, name, other]
        if form == BY_WEIGHT or before == now:
            assert line == ("loaded" if form == BY_WEIGHT else "same")
        else:
            refusal = f"rank by rank, for {before}, and this model has {now}; save with dist_ckpt_optim_fully"
            assert refusal in line and "\n" not in line


def test_a_process_without_this_package_finds_none_of_a_v(found) -> None:
    assert [rank[SHARED_KEYS] for rank in found] == [set(), set()]
