"""slime's own start-up, model, log-probabilities, advantages and training step on forked ranks.

    run = train("v-half", Job(chunks=2))      # three steps of policy gradients, on rollouts of unlike length

Its actor, which Ray starts beside an inference engine, is left out: what the actor does around a step is
written here.  Schedules come by slime's own hook, the function of --custom-megatron-init-path.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from megatron.core import mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.utils import get_model_config
from slime.backends.megatron_utils import actor, initialize, loss, model
from slime.backends.megatron_utils.arguments import megatron_parse_args, validate_args
from slime.utils import accelerator
from slime.utils.arguments import get_slime_extra_args_provider
from slime.utils.dp_schedule import build_dp_schedule

import megatron_pp_ext
from tests.frameworks.packed_attention import PackedAttention
from tests.support import frameworks, ranks
from tests.support.training import global_parameters, initialize_by_layer

SAMPLES = (16, 6, 10)
"""The samples of each rollout, all of one training step."""
PROMPT, RESPONSE, LONGEST = 8, 16, 32
"""The most tokens of a prompt, of a response, and of the samples in a microbatch, unless one is longer."""

FLAGS = """
    --num-layers 8 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --position-embedding-type rope --vocab-size 64
    --make-vocab-size-divisible-by 1
    --swiglu --disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --transformer-impl local --attention-backend unfused
    --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion
    --use-cpu-initialization --distributed-backend gloo --tokenizer-type NullTokenizer
    --optimizer adam --lr 0.01 --lr-decay-style constant --weight-decay 0 --clip-grad 1e9
    --pipeline-model-parallel-size 2 --actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-batch-size 16
    --num-rollout 3 --global-batch-size 16 --micro-batch-size 1 --use-dynamic-batch-size
    --max-tokens-per-gpu 32 --data-pad-size-multiplier 4
    --advantage-estimator grpo --entropy-coef 0.01 --eps-clip-high 0.2
    --load nowhere --spec tests.frameworks.slime_loop packed_layers
"""


@dataclass(frozen=True)
class Job:
    """What is trained on two pipeline ranks."""

    chunks: int = 1
    is_recomputed: bool = False
    """Whether every layer is computed again in the backward, as half of slime's scripts have it."""
    init: str = "tests.frameworks.slime_loop.install"
    """The function that slime calls in each process, by its full name, where there is a schedule."""


@dataclass
class Run:
    """What one rank saw, or all of them together."""

    log_probs: list[list[torch.Tensor]] = field(default_factory=list)  # of each sample, a rollout
    losses: list[list[list[float]]] = field(default_factory=list)  # what each microbatch reports, a step
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # at the end, by global name
    layers: list[list[int]] = field(default_factory=list)  # of each chunk
    steps: list[int] = field(default_factory=list)  # microbatches of each step that our runner did


def train(name: str | None, job: Job = Job(), **about: Any) -> Run:
    """Train under schedule ``name``, as ``install`` takes it with ``about``; None for stock's 1F1B."""
    first, last = ranks.run_ranks(_train, 2, name, job, about)
    assert first.norms == last.norms and first.losses == []
    last.weights |= first.weights
    return last


def _train(rank: int, name: str | None, job: Job, about: dict[str, Any]) -> Run:
    run = Run()
    accelerator.current_device = accelerator.device = lambda *index: torch.device("cpu")
    torch.distributed.init_process_group("gloo")
    args = _arguments(rank, job)
    if name is not None:
        os.environ |= {"PIPELINE_SCHEDULE": name, "PIPELINE_MICROBATCHES": "8"}
        args.custom_megatron_init_path, args.install = job.init, about
    # It asks for an older NumPy than others do.
    initialize.np = SimpleNamespace(__version__="1.26", random=np.random)
    initialize.init(args)
    model.train_metric_utils.reduce_train_step_metrics = _watched(
        run, model.train_metric_utils.reduce_train_step_metrics
    )
    with frameworks.counting_steps() as run.steps:
        chunks, optimizer, scheduler = model.setup_model_and_optimizer(args)
        initialize_by_layer(chunks)
        optimizer.reload_model_params()
        run.layers = [[layer.layer_number for layer in _layers(chunk)] for chunk in chunks]
        for number, samples in enumerate(SAMPLES):
            _roll(args, number, samples, chunks, optimizer, scheduler, run)
    run.weights = {name: weight.detach().clone() for name, weight in global_parameters(chunks)}
    return run


def install(args: Namespace) -> None:
    """Install what the environment and ``args.install`` have, as slime calls the function of its users."""
    name = os.environ["PIPELINE_SCHEDULE"]
    megatron_pp_ext.install(name, ranks=args.pipeline_model_parallel_size, microbatches=8, **args.install)


def _arguments(rank: int, job: Job) -> Namespace:
    words = FLAGS.split()
    if job.chunks > 1:
        words += [
            f"--num-virtual-stages-per-pipeline-rank={job.chunks}",
            "--microbatch-group-size-per-virtual-pipeline-stage=1",
        ]
    if job.is_recomputed:
        words += ["--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1"]
    sys.argv = ["train.py", *words]
    args = megatron_parse_args(get_slime_extra_args_provider(), skip_hf_validate=True)
    args.rank = rank
    validate_args(args)
    return args


def packed_layers(args: Namespace, config: Any, vp_stage: int | None) -> Any:
    """Return a layer that needs no kernels, as slime asks ``--spec`` for one."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    return spec


def _layers(chunk: DistributedDataParallel) -> Any:
    return model.unwrap_model(chunk).decoder.layers


def _watched(run: Run, reduce: Callable[..., Any]) -> Callable[..., Any]:
    def watched(reports: list[dict[str, Any]], **about: Any) -> Any:
        run.losses.append([report["values"].tolist() for report in reports])
        return reduce(reports, **about)

    return watched


def _roll(
    args: Namespace, number: int, samples: int, chunks: list[Any], optimizer: Any, scheduler: Any, run: Run
) -> None:
    """Do what slime's actor does with a rollout: log-probabilities, advantages on the last rank, a step."""
    rollout = _rollout(number, samples)
    parallel = {"dp_size": 1, "cp_size": 1, "vpp_size": len(chunks), "microbatch_group_size_per_vp_stage": 1}
    if len(chunks) > 1:
        config = get_model_config(chunks[0])
        parallel["microbatch_group_size_per_vp_stage"] = config.microbatch_group_size_per_vp_stage
    _, indices, microbatches, sizes = build_dp_schedule(
        args,
        parallel,
        rollout["total_lengths"],
        global_batch_size=samples,
        rollout_indices=list(range(samples)),
    )
    order = [place for microbatch in indices[0] for place in microbatch]
    rollout = {key: [values[place] for place in order] for key, values in rollout.items()}
    rollout |= {"micro_batch_indices": indices[0], "num_microbatches": microbatches}
    data = actor.get_data_iterator(rollout)
    rollout |= model.forward_only(loss.get_log_probs_and_entropy, args, chunks, data, microbatches)
    if mpu.is_pipeline_last_stage(ignore_virtual=True):
        run.log_probs.append(rollout["log_probs"])
        loss.compute_advantages_and_returns(args, rollout)

    def step(*about: Any, **more: Any) -> Any:
        reported, norm = train_one_step(*about, **more)
        run.norms.append(norm)
        return reported, norm

    train_one_step, model.train_one_step = model.train_one_step, step
    try:
        model.train(number, chunks, optimizer, scheduler, data, microbatches, sizes)
    finally:
        model.train_one_step = train_one_step


def _rollout(seed: int, samples: int) -> dict[str, Any]:
    """Samples of lengths that vary, as slime's actor gets them."""
    draw = torch.Generator().manual_seed(seed)
    prompts = torch.randint(2, PROMPT + 1, (samples,), generator=draw).tolist()
    responses = torch.randint(1, RESPONSE + 1, (samples,), generator=draw).tolist()
    masks = [torch.ones(length) for length in responses]
    return {
        "tokens": [
            torch.randint(0, 64, (prompt + response,), generator=draw)
            for prompt, response in zip(prompts, responses, strict=True)
        ],
        "total_lengths": [prompt + response for prompt, response in zip(prompts, responses, strict=True)],
        "response_lengths": responses,
        "loss_masks": masks,
        "rollout_mask_sums": [mask.sum() for mask in masks],
        "rewards": torch.randn(samples, generator=draw).tolist(),
    }
