"""One rank of several that share a GPU, started by torchrun with the flags of a training run behind it.

    NCCL_MULTI_RANK_GPU_ENABLE=1 python -m torch.distributed.run --standalone --nproc-per-node 4 \
        benchmarks/one_gpu.py --pipeline-model-parallel-size 4 ...

Where NCCL refuses that, --distributed-backend gloo passes all messages through the host: slow, and right.
"""

import os
import runpy
from functools import wraps
from typing import Any

import torch.distributed as dist

os.environ["LOCAL_RANK"] = "0"
# Megatron demands one hardware queue of tensor and context parallel jobs below Blackwell, and a schedule that
# runs with one runs with more: messages are placed so that one is enough.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

_barrier = dist.barrier


@wraps(_barrier)
def barrier(*args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
    """Gloo knows no devices, and Megatron names them."""
    named = {} if dist.get_backend() == "gloo" else {"device_ids": device_ids}
    return _barrier(*args, **named, **kwargs)


dist.barrier = barrier
runpy.run_module("megatron_pp_ext.pretrain_gpt", run_name="__main__")
