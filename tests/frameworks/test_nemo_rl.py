"""NeMo-RL's Megatron policy worker under our schedules: as without us, to the last bit.

NEMO_RL names its checkout.  It is written for a newer Megatron and an older transformers than are installed:
it imports two names that these jobs do not use, and asks for a version.
"""

import os
import sys
from functools import cache
from unittest import mock

import pytest
import torch

from tests.support import frameworks, rounding

os.environ["TORCHDYNAMO_DISABLE"] = "1"
frameworks.require_checkout(
    "NEMO_RL",
    "nemo_rl",
    *("zmq", "pynvml", "uvicorn", "fastapi", "mlflow", "swanlab", "prometheus_client"),
)
frameworks.name_engine_layers()

import megatron.bridge  # noqa: E402, F401
import megatron.core.distributed.fsdp.mcore_fsdp_adapter as fsdp  # noqa: E402
import ray  # noqa: E402

ray.remote = lambda *given, **about: given[0] if given and callable(given[0]) else lambda cls: cls
fsdp.FullyShardedDataParallelV1 = fsdp.FullyShardedDataParallelV2 = fsdp.FullyShardedDataParallel
with mock.patch.object(sys.modules["transformers"], "__version__", "5.11.0"):
    from tests.frameworks import nemo_worker
from tests.frameworks.nemo_worker import Job, Run, train  # noqa: E402


@cache
def stock(job: Job) -> Run:
    return train(None, job)


@pytest.mark.parametrize(
    ("name", "job"),
    [
        ("zb-h1", Job()),
        ("zb-h1", Job(packs=False)),
        ("zb-h2", Job(is_recomputed=True)),
        ("flex", Job(is_recomputed=True)),
    ],
)
def test_same_bits_as_stock(name: str, job: Job) -> None:
    """Log-probabilities, losses and weights of three steps, two with an odd number of microbatches."""
    about = {"chunks": 1, "memory_limit": 1.0} if name == "flex" else {}
    ours, theirs = train(name, job, **about), stock(job)
    counts = [7, 7, 3, 3, 6, 6] if job.packs else [8, 8, 3, 3, 5, 5]
    assert (ours.steps, theirs.steps) == (counts, [])
    assert ours.layers == [5, 6, 7, 8]
    assert ours.losses == theirs.losses
    assert ours.norms == pytest.approx(theirs.norms, rel=rounding.relative())
    assert all(map(torch.equal, ours.log_probs, theirs.log_probs))
    assert ours.weights.keys() == theirs.weights.keys()
    assert [
        name for name, weight in theirs.weights.items() if not torch.equal(weight, ours.weights[name])
    ] == []


def test_a_v_is_refused() -> None:
    """The worker keeps the first chunk of a model alone."""
    with pytest.raises(AssertionError, match="chunk"):
        nemo_worker.train("v-half")
