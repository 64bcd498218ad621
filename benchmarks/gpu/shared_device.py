"""One rank of several that share a GPU, started by torchrun with the flags of a training run behind it.

    NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 python -m torch.distributed.run --standalone \
        --nproc-per-node 4 -m benchmarks.gpu.shared_device --pipeline-model-parallel-size 4 ...

NCCL shares a device from 2.30 on.  Elsewhere --distributed-backend gloo passes all messages through the host,
slowly.
"""

import os
import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch.distributed as dist

_barrier: Any = dist.barrier
_together: Any = dist.ProcessGroup.allreduce_coalesced


@wraps(_barrier)
def barrier(*args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
    """Leave out the devices that Megatron names under gloo, which does not know any."""
    devices = {} if dist.get_backend() == "gloo" else {"device_ids": device_ids}
    return _barrier(*args, **devices, **kwargs)


@dataclass
class Works:
    """Several collectives that are waited for as one."""

    works: Sequence[dist.Work]

    def wait(self) -> None:
        """Wait for all."""
        for work in self.works:
            work.wait()


@wraps(_together)
def one_by_one(group: dist.ProcessGroup, tensors: Sequence[Any], options: Any = None) -> Any:
    """Reduce the buckets that Megatron reduces together each by itself under gloo, which cannot on a GPU."""
    if dist.get_backend(group) != "gloo":
        return _together(group, tensors, options)
    reduction = dist.AllreduceOptions()
    reduction.reduceOp = options.reduceOp
    return Works([group.allreduce([tensor], reduction) for tensor in tensors])


if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = "0"
    # Megatron demands one hardware queue for tensor and context parallelism below Blackwell.  Messages are
    # placed such that one is enough.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    dist.barrier = barrier
    dist.ProcessGroup.allreduce_coalesced = one_by_one  # type: ignore[method-assign, assignment]
    runpy.run_module("megatron_pp_ext.pretrain_gpt", run_name="__main__")
