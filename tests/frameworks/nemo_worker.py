"""NeMo-RL's Megatron policy worker on forked ranks: its ``get_logprobs`` and its ``train``.

    run = train("zb-h1", Job())       # three steps of GRPO's loss, on rollouts of unlike length

Its start-up, which Ray does and which reads a hub, is left out: the worker gets its attributes here.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.model_provider import get_model
from megatron.bridge.training.config import OptimizerConfig, SchedulerConfig
from megatron.bridge.training.optim import setup_optimizer
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl
from nemo_rl.utils.timer import Timer

import megatron_pp_ext
from tests.frameworks.megatron_bridge import TRANSFORMER, layers_of
from tests.frameworks.packed_sequences import packed_layers
from tests.support import frameworks, ranks
from tests.support.training import global_parameters, initialize_by_layer

SAMPLES = (16, 6, 10)
"""The samples of each step."""
PROMPT, RESPONSE, LONGEST = 8, 16, 32
"""The most tokens of a prompt, of a response, and of a microbatch."""


@dataclass(frozen=True)
class Job:
    """What is trained on two pipeline ranks."""

    packs: bool = True
    """Whether samples are packed, as in NeMo-RL's own recipes, or a microbatch has two, padded."""
    is_recomputed: bool = False
    """Whether every layer is computed again in the backward."""


@dataclass
class Run:
    """What one rank saw, or all of them together."""

    log_probs: list[torch.Tensor] = field(default_factory=list)  # (samples, tokens), a step
    losses: list[dict[str, list[float]]] = field(default_factory=list)  # of each microbatch by name, a step
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # at the end, by global name
    layers: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # microbatches of each step that our runner did


def train(name: str | None, job: Job = Job(), **about: Any) -> Run:
    """Train under schedule ``name``, as ``install`` takes it with ``about``; None for stock's 1F1B."""
    first, last = ranks.run_ranks(_train, 2, name, job, about)
    assert first.norms == last.norms and first.losses == last.losses, "the worker broadcasts them"
    last.weights |= first.weights
    return last


def _train(rank: int, name: str | None, job: Job, about: dict[str, Any]) -> Run:
    run = Run()
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 2)
    model_parallel_cuda_manual_seed(1)
    installed = megatron_pp_ext.installed(name, ranks=2, microbatches=8, **about) if name else nullcontext()
    with installed, frameworks.counting_steps() as run.steps:
        worker = _worker(job)
        run.layers = [layer.layer_number for layer in worker.model.module.decoder.layers]
        loss = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.1))
        for step, samples in enumerate(SAMPLES):
            rollouts = _shard(_rollouts(step, samples), job)
            log_probs = worker.get_logprobs(data=rollouts)["logprobs"]
            run.log_probs.append(log_probs)
            rollouts |= {
                "prev_logprobs": log_probs,
                "generation_logprobs": log_probs,
                "reference_policy_logprobs": log_probs - 0.1,
            }
            trained = worker.train(rollouts, loss, gbs=samples)
            run.losses.append(trained["all_mb_metrics"])
            run.norms.append(trained["grad_norm"].item())
    run.weights = {name: weight.detach().clone() for name, weight in global_parameters([worker.model])}
    return run


def _worker(job: Job) -> MegatronPolicyWorkerImpl:
    """Return a worker whose model and optimizer are made as NeMo-RL makes them, by Megatron-Bridge."""
    recomputation = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    provider = GPTModelProvider(
        **TRANSFORMER,
        **(recomputation if job.is_recomputed else {}),
        pipeline_model_parallel_size=2,
        transformer_layer_spec=packed_layers if job.packs else layers_of,
        seq_length=LONGEST,
        vocab_size=64,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    provider.register_pre_wrap_hook(_set_weights)
    provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    (model,) = get_model(
        provider,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
        pg_collection=provider._pg_collection,
        pre_wrap_hook=_set_weights,
        mixed_precision_wrapper=None,
    )
    # The limit is never reached: the norm, whose sum goes by rank, is computed and changes no weight.
    decay = SchedulerConfig(
        lr_decay_style="constant",
        start_weight_decay=0.0,
        end_weight_decay=0.0,
        weight_decay_incr_style="constant",
    )
    # Counts of samples, which Bridge computes from its training config.
    decay.lr_warmup_steps, decay.lr_decay_steps, decay.wd_incr_steps = 0, 100, 100
    adam = OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        min_lr=0.01,
        weight_decay=0.0,
        clip_grad=1e9,
        bf16=False,
        fp16=False,
        use_distributed_optimizer=True,
    )
    adam.finalize()
    optimizer, scheduler = setup_optimizer(
        optimizer_config=adam,
        scheduler_config=decay,
        model=[model],
        use_gloo_process_groups=True,
    )
    worker = object.__new__(MegatronPolicyWorkerImpl)
    vars(worker).update(
        cfg=_settings(job),
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        dp_size=1,
        dtype=torch.float32,
        rank=torch.distributed.get_rank(),
        timer=Timer(),
        mcore_state=SimpleNamespace(straggler_timer=None),
        megatron_cfg=SimpleNamespace(optimizer=SimpleNamespace(), ddp=SimpleNamespace()),
        sampling_params=None,
        draft_model=None,
        defer_fp32_logits=False,
        delegate_pack_to_model=False,
        delegate_mtp_loss_mask_to_model=False,
        model_slices_context_parallel_inputs=False,
        media_placeholder_token_id=None,
        should_disable_forward_pre_hook=False,
        fp8_cfg=None,
        _router_replay_enabled=False,
        _first_train_step_forward_pre_hook_disabled=False,
    )
    return worker


def _set_weights(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    initialize_by_layer(chunks)
    return chunks


def _settings(job: Job) -> dict[str, Any]:
    return {
        "train_global_batch_size": max(SAMPLES),
        "train_micro_batch_size": 2,
        "logprob_batch_size": 2,
        "make_sequence_length_divisible_by": 1,
        "max_total_sequence_length": LONGEST,
        "dynamic_batching": {"enabled": False},
        "sequence_packing": {"enabled": job.packs},
        "draft": {"enabled": False},
        "megatron_cfg": {
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 2,
            "context_parallel_size": 1,
            "sequence_parallel": False,
            "empty_unused_memory_level": 0,
            "moe_per_layer_logging": False,
        },
    }


def _shard(rollouts: BatchedDataDict, job: Job) -> BatchedDataDict:
    """Return the samples of the one replica, in microbatches as NeMo-RL's driver packs them."""
    if not job.packs:
        return rollouts.shard_by_batch_size(1, batch_size=rollouts.size)[0]
    packing = {
        "algorithm": "modified_first_fit_decreasing",
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "sequence_length_pad_multiple": 1,
        "max_tokens_per_microbatch": LONGEST,
    }
    shards, _ = rollouts.shard_by_batch_size(1, batch_size=rollouts.size, sequence_packing_args=packing)
    return shards[0]


def _rollouts(seed: int, samples: int) -> BatchedDataDict:
    """Samples of lengths that vary, padded to the right."""
    draw = torch.Generator().manual_seed(seed)
    prompts = torch.randint(2, PROMPT + 1, (samples, 1), generator=draw)
    lengths = prompts + torch.randint(1, RESPONSE + 1, (samples, 1), generator=draw)
    place = torch.arange(PROMPT + RESPONSE)
    return BatchedDataDict(
        input_ids=torch.randint(0, 64, (samples, len(place)), generator=draw) * (place < lengths),
        input_lengths=lengths.flatten(),
        token_mask=((place >= prompts) & (place < lengths)).float(),
        sample_mask=torch.ones(samples),
        advantages=torch.randn(samples, len(place), generator=draw),
    )
