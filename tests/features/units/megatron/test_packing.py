"""Megatron's own packer with ours in its place: on a checkout that has one, else it is refused."""

import json
import os
import subprocess
import sys
from enum import Enum
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks  # noqa: F401  (stand-ins for torch.cuda)

# isort: split
from megatron.core.datasets import data_schedule

from megatron_pp_ext.features.units.megatron.packer import pack_by_cost

CHECKOUT = Path(os.environ.get("MEGATRON_LM", ""), "megatron", "core", "datasets", "data_schedule.py")
ROOT = Path(__file__).parents[4]


@pytest.mark.skipif(hasattr(data_schedule, "scheduler_map"), reason="this Megatron packs sequences")
def test_a_megatron_without_a_packer_is_named():
    with pytest.raises(ValueError, match="does not pack sequences by a scheduler"):
        pack_by_cost("1f1b", ranks=2)
    with pytest.raises(ValueError, match="no schedule is called '1f2b'"):
        pack_by_cost("1f2b", ranks=2)


class OneByOne:
    """A packer that puts each document into a microbatch of its own."""

    max_seq_len_all_ranks, dp_size = 100, 2

    def get_groups_and_subsamples(self, sample_id_seqlens):
        numbers = [number for number, _ in sample_id_seqlens]
        return [[[one], [other]] for one, other in zip(numbers[::2], numbers[1::2], strict=True)]


class Name(Enum):
    DP_BALANCED = "dp_balanced"


@pytest.mark.parametrize("key", [Name.DP_BALANCED, "dp_balanced"], ids=["main", "dev"])
def test_the_packer_of_megatrons_name_is_replaced_and_asked(monkeypatch, key):
    schedulers = {key: OneByOne}
    monkeypatch.setattr(data_schedule, "scheduler_map", schedulers, raising=False)
    documents = [(0, 90), (1, 5), (2, 80), (3, 9)]
    given = OneByOne().get_groups_and_subsamples(documents)
    for _ in range(2):
        pack_by_cost("1f1b", ranks=2, equal_at=50)
        found = schedulers[key]().get_groups_and_subsamples(documents)
        assert found != given
        replicas = [{one for row in found for one in row[replica]} for replica in range(2)]
        assert [len(replica & {0, 2}) for replica in replicas] == [1, 1], "each has one of the long ones"
    assert schedulers[key].of_megatron is OneByOne, "the second call replaces the first"


@pytest.mark.checkout
@pytest.mark.skipif(
    not CHECKOUT.is_file() or "scheduler_map" not in CHECKOUT.read_text(),
    reason="MEGATRON_LM does not name a Megatron-LM checkout that packs sequences by a scheduler",
)
def test_packed_microbatches_train_by_cost_and_in_order():
    """m is the packer's, and losses come back in the order in which it hands microbatches over."""
    paths = os.pathsep.join((str(CHECKOUT.parents[3]), str(ROOT)))
    job = [sys.executable, "-m", "tests.features.units.megatron.packing_job"]
    ran = subprocess.run(
        job,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    ranks = json.loads(ran.stdout.splitlines()[-1])
    first, other, *_ = (rank["by_cost"] for rank in ranks)
    assert ranks[0]["given"] != first != other
    assert [rank["by_cost"] for rank in ranks] == [first, other] * 2, "pipeline ranks have the same data"

    def work(replica):
        return [
            sum((end - start) + (end - start) ** 2 / 8 for start, end in pairwise(ends)) for ends in replica
        ]

    given = [work(rank["given"]) for rank in ranks[:2]]
    assert max(map(sum, (work(first), work(other)))) < max(map(sum, given))
    for rank in ranks[2:]:
        assert rank["ours"] == rank["stock_by_cost"] != []
        assert rank["in_v"] == rank["stock_by_cost"], "a V has both ends of the model on the last rank"
