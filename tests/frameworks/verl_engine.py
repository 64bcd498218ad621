"""verl's Megatron engine for an actor, its reference model and a critic, on forked ranks.

    (run,) = train(folder, "v-half", Job(chunks=2))  # passes of all three, then updates of two, three times

Its workers, which Ray starts, and the model's description, which reads a tokenizer, are left out: what they
would give the engines is written here, and the last rank of each pipeline gives its outputs to the others as
verl's driver does.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.bridge.peft import utils as peft_utils
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from tensordict import TensorDict
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.utils.megatron_utils import unwrap_model
from verl.workers.config import ActorConfig, CriticConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.engine.megatron.transformer_impl import (
    MegatronEngine,
    MegatronEngineWithLMHead,
    MegatronEngineWithValueHead,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss, value_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

import megatron_pp_ext
from tests.frameworks.llama import LLAMA
from tests.frameworks.megatron_bridge import FOR_A_CPU, layers_of
from tests.support import frameworks, ranks
from tests.support.training import global_parameters, normal

SAMPLES = (16, 6, 10)
"""The number of samples of each step."""
PROMPT, RESPONSE = 8, 16
"""The most tokens of either; samples have fewer."""
LONGEST = 32
"""The most tokens of a microbatch, into which verl puts as many samples as fit."""
ACTOR = ActorConfig(
    strategy="megatron",
    rollout_n=1,
    ppo_micro_batch_size_per_gpu=2,
    use_kl_loss=True,
    kl_loss_coef=0.1,
    entropy_coeff=0.01,
)
CRITIC = CriticConfig(strategy="megatron", ppo_micro_batch_size_per_gpu=2)


LORA = {"type": "lora", "rank": 4, "alpha": 8}


@dataclass(frozen=True)
class Job:
    """What the engines are made for, on two pipeline ranks."""

    chunks: int = 1
    replicas: int = 1
    """Data-parallel replicas: several have different numbers of samples, two in a microbatch; one alone has
    verl's dynamic microbatches."""
    adapts: bool = False
    """Whether the actor trains adapters alone (LoRA), without which it is the reference."""
    order: str | None = None
    """How the microbatches of updates are ordered by the lengths of their samples."""
    by_workers: bool = False
    """Whether updates are those of verl's workers, which make metrics of what the engines return."""


@dataclass
class Run:
    """What one rank saw."""

    passes: list[dict[str, torch.Tensor]] = field(default_factory=list)  # what the engines computed, a step
    losses: list[list[float]] = field(default_factory=list)  # of each microbatch, an update
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # at the end, as sent to the rollouts
    adapters: dict[str, torch.Tensor] = field(
        default_factory=dict
    )  # those alone, as sent once weights are there
    layers: list[list[int]] = field(default_factory=list)  # of each chunk
    steps: list[int] = field(default_factory=list)  # microbatches of each step that our runner did
    metrics: list[dict[str, Any]] = field(default_factory=list)  # of each update, where workers do them


def train(folder: str, name: str | None, job: Job = Job()) -> list[Run]:
    """Train on the Hugging Face weights in ``folder``; where ``name`` is None, under stock's 1F1B.

    Returns what the last rank of each replica's pipeline saw.
    """
    runs = ranks.run_ranks(_train, 2 * job.replicas, folder, name, job)
    assert [run.losses for run in runs[: job.replicas]] == [[]] * job.replicas
    return runs[job.replicas :]


class _Cpu(PlatformCUDA):
    """Where verl puts batches."""

    device_name = "cpu"

    def current_device(self) -> str:
        return "cpu"


class _CausalAttention(DotProductAttention):
    """Like Transformer Engine's causal attention, it does not look at a mask."""

    def forward(
        self, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return super().forward(query, key, value, None, *args, **kwargs)


def _train(rank: int, folder: str, name: str | None, job: Job) -> Run:
    set_platform(_Cpu())
    peft_utils.HAVE_TE = False  # its stand-in has no layers to ask for
    torch.distributed.init_process_group("gloo")
    run, replica = Run(), rank % job.replicas
    with (
        megatron_pp_ext.installed(name, ranks=2, microbatches=8, order=job.order, memory_limit=_limit(name))
        if name
        else nullcontext(),
        frameworks.counting_steps() as run.steps,
    ):
        actor = _engine(MegatronEngineWithLMHead, folder, job, lora=LORA if job.adapts else {})
        reference = None if job.adapts else _engine(MegatronEngineWithLMHead, folder, job, forward_only=True)
        critic = _engine(MegatronEngineWithValueHead, folder, job)
        _set_by_name(actor, "adapter.")
        _set_by_name(critic, "output_layer.")
        for step in range(len(SAMPLES)):
            samples = SAMPLES[(step + replica) % len(SAMPLES)]
            data = _rollouts(step + 10 * replica, samples, is_dynamic=job.replicas == 1)
            _step(actor, reference, critic, data, run, job)
        run.layers = [
            [layer.layer_number for layer in chunk.decoder.layers] for chunk in unwrap_model(actor.module)
        ]
        run.weights = _sent(actor)
        if job.adapts:
            run.adapters = _sent(actor, base_sync_done=True)
    return run


def _limit(name: str) -> float | None:
    """Return the memory limit of a schedule that is compiled, as part of what 1F1B keeps."""
    return 1.0 if name == "flex" else None


def _sent(actor: MegatronEngine, **how: bool) -> dict[str, torch.Tensor]:
    """Return what ``actor`` sends to the rollouts."""
    weights, _ = actor.get_per_tensor_param(**how)
    return {name: weight.clone() for name, weight in weights}


def _engine(
    made: type[MegatronEngine],
    folder: str,
    job: Job,
    forward_only: bool = False,
    lora: dict[str, Any] | None = None,
) -> MegatronEngine:
    """Make and start an engine by its own methods, on the weights in ``folder``."""
    engine = made(
        model_config=_Model(
            folder, "value_model" if made is MegatronEngineWithValueHead else "language_model", lora or {}
        ),
        engine_config=McoreEngineConfig(
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=job.chunks if job.chunks > 1 else None,
            forward_only=forward_only,
            use_remove_padding=False,
            pad_bshd_to_minibatch_max=False,
            override_transformer_config={
                **FOR_A_CPU,
                "pipeline_dtype": torch.bfloat16,
                "transformer_layer_spec": _layers,
                # Otherwise verl makes as many microbatches as stock's interleaved schedule takes.
                "microbatch_group_size_per_vp_stage": 1,
            },
        ),
        # The limit is never reached: the norm, whose sum goes by rank, is computed and changes no weight.
        optimizer_config=McoreOptimizerConfig(
            lr=0.01, lr_decay_style="constant", total_training_steps=10, weight_decay=0.0, clip_grad=1e9
        ),
        checkpoint_config=CheckpointConfig(),
    )
    model_parallel_cuda_manual_seed(1)  # verl does so where there is a device
    engine.initialize()
    return engine


def _set_by_name(engine: MegatronEngine, part: str) -> None:
    """Set the weights that are in no file: a rank draws them after whatever else it has drawn."""
    with torch.no_grad():
        for name, weight in global_parameters(engine.module):
            if part in name:
                weight.copy_(0.1 * normal(name, weight.shape))
    engine.optimizer.reload_model_params()


class _Model(SimpleNamespace):
    """What an engine asks of verl's HFModelConfig."""

    def __init__(self, folder: str, kind: str, lora: dict[str, Any]) -> None:
        super().__init__(
            model_type=kind,
            hf_config=LLAMA,
            architectures=LLAMA.architectures,
            local_path=folder,
            trust_remote_code=False,
            share_embeddings_and_output_weights=False,
            mtp=SimpleNamespace(enable=False),
            lora=lora,
            tokenizer=SimpleNamespace(pad_token_id=0),
        )

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)

    def get_processor(self) -> None:
        return None


def _layers(config: Any, vp_stage: int | None = None) -> Any:
    spec = layers_of(config, vp_stage)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = _CausalAttention
    return spec


def _step(
    actor: MegatronEngine,
    reference: MegatronEngine | None,
    critic: MegatronEngine,
    data: TensorDict,
    run: Run,
    job: Job,
) -> None:
    """Do all passes, then update the actor by PPO, with a penalty on its distance, and the critic.

    Without a model of its own the reference is the actor without its adapters.
    """
    seen = {}
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    for name, kind, engine, context in (
        ("old_log_probs", "log_probs", actor, nullcontext()),
        (
            "ref_log_prob",
            "log_probs",
            reference or actor,
            nullcontext() if reference else actor.disable_adapter(),
        ),
        ("values", "values", critic, nullcontext()),
    ):
        with context, engine.eval_mode():
            output = engine.infer_batch(data.copy())
        nested = output.get("model_output", {})
        padded = [{kind: no_padding_2_padding(tensor, data) for kind, tensor in nested.items()}]
        torch.distributed.broadcast_object_list(padded, group=pipeline, group_src=1)
        data[name] = padded[0][kind]
        seen |= {f"{name}: {kind}": tensor for kind, tensor in padded[0].items()}
    run.passes.append(seen)
    data["returns"] = data["values"] + data["advantages"]
    for engine, loss in ((actor, partial(ppo_loss, ACTOR)), (critic, partial(value_loss, CRITIC))):
        if job.by_workers:
            returned = _worker(engine, loss).train_batch(data.copy())
            if returned is not None:
                run.losses.append([])
                run.metrics.append(tensordict_utils.get(returned, "metrics"))
            continue
        with engine.train_mode():
            output = engine.train_batch(data.copy(), loss)
            engine.lr_scheduler_step()
        if output:
            run.losses.append(output["loss"])
            run.norms.append(output["metrics"]["grad_norm"])


def _worker(engine: MegatronEngine, loss: Any) -> TrainingWorker:
    """Return verl's worker of ``engine``, which Ray would start."""
    worker = TrainingWorker.__new__(TrainingWorker)
    worker.engine, worker.loss_fn, worker.engine_config = engine, loss, engine.engine_config
    worker.model_config, worker.flops_counter, worker.device_name = {}, None, "cpu"
    return worker


def _rollouts(seed: int, samples: int, is_dynamic: bool) -> TensorDict:
    """Prompts and responses of lengths that vary, padded as rollouts come, in the engine's format."""
    draw = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, PROMPT + 1, (samples, 1), generator=draw)
    responses = torch.randint(1, RESPONSE + 1, (samples, 1), generator=draw)
    place = torch.arange(PROMPT + RESPONSE) - PROMPT
    mask = ((place >= -prompts) & (place < responses)).long()
    tokens = torch.randint(1, LLAMA.vocab_size, mask.shape, generator=draw) * mask
    data = tensordict_utils.get_tensordict(
        {
            "input_ids": tokens,
            "prompts": tokens[:, :PROMPT],
            "responses": tokens[:, PROMPT:],
            "attention_mask": mask,
            "response_mask": mask[:, PROMPT:],
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "advantages": torch.randn(samples, RESPONSE, generator=draw),
        },
        {
            "use_dynamic_bsz": is_dynamic,
            "max_token_len_per_gpu": LONGEST,
            "micro_batch_size_per_gpu": 2,
            "temperature": 1.0,
            "calculate_entropy": True,
            "global_batch_size": samples,
        },
    )
    return left_right_2_no_padding(data)
