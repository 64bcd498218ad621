"""ms-swift's trainer on mcore-bridge's model, on forked ranks.

    runs = train("v-half")          # by its own train_step and evaluate, on weights from its own loader

Its start-up, which reads a dataset and a hub, is left out: the trainer gets its attributes here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from mcore_bridge import ModelConfig, get_mcore_model
from mcore_bridge.bridge import GPTBridge
from mcore_bridge.model.register import ModelLoader
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from swift.megatron.callbacks.print import PrintCallback
from swift.megatron.callbacks.tensorboard import TensorboardCallback
from swift.megatron.trainers.trainer import MegatronTrainer

import megatron_pp_ext
from tests.frameworks.llama import LLAMA
from tests.frameworks.swift_goals import CHANNELS, LEARN, PREFERENCES, RANKING, learn_preferences
from tests.support import frameworks, ranks
from tests.support.training import global_parameters

MICROBATCHES = (8, 3, 5)
"""The number of microbatches of each step."""
LONGEST = 32
"""Tokens of the longest microbatch; others have fewer."""
SAMPLES = {PREFERENCES: 2, RANKING: 3}
"""The number of samples of a microbatch, where it is not one."""


NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""The norms that are part of Transformer Engine's layers, as Megatron's own layers call theirs."""


@dataclass
class Run:
    """What one rank saw, or all of them together."""

    losses: list[dict[str, list[float]]] = field(default_factory=list)  # by name, of each microbatch
    norms: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # at the end, by global name
    exported: dict[str, torch.Tensor] = field(default_factory=dict)  # as loaded, in Hugging Face's names
    layers: list[list[int]] = field(default_factory=list)  # of each chunk
    steps: list[int] = field(default_factory=list)  # microbatches of each step that our runner did


def train(
    folder: str,
    name: str | None,
    chunks: int = 1,
    goal: str = "",
    order: str | None = None,
    output: str | None = None,
) -> Run:
    """Train on the Hugging Face weights in ``folder``; where ``name`` is None, under stock's 1F1B.

    The ``goal`` is that of ``swift_goals``, or the next token; ``order`` is that of ``install``.  With a
    folder for ``output``, ms-swift's own callbacks log each step there.
    """
    runs = ranks.run_ranks(_train, 2, folder, name, chunks, goal, order, output)
    last = next(run for run in runs if run.losses)
    for run in runs:
        assert run.norms == last.norms
        assert run.losses in ([], last.losses)
        last.weights |= run.weights
        last.exported |= run.exported
    return last


def _train(
    rank: int, folder: str, name: str | None, chunks: int, goal: str, order: str | None, output: str | None
) -> Run:
    if name is not None:
        megatron_pp_ext.install(name, ranks=2, microbatches=max(MICROBATCHES), order=order)
    torch.distributed.init_process_group("gloo")
    virtual = chunks if chunks > 1 else None
    parallel_state.initialize_model_parallel(1, 2, virtual)
    model_parallel_cuda_manual_seed(1)
    ModelLoader.get_transformer_layer_spec = _local_layers
    GPTBridge._set_state_dict = _by_local_name(GPTBridge._set_state_dict)
    config = _config(virtual)
    models = get_mcore_model(config)
    config.bridge.load_weights(models, folder)
    run = Run(layers=[[layer.layer_number for layer in model.decoder.layers] for model in models])
    run.exported = {
        name: weight.clone() for name, weight in config.bridge.export_weights(models, target_device="cpu")
    }
    trainer = _trainer(config, models)
    if goal == PREFERENCES:
        references = get_mcore_model(config)
        config.bridge.load_weights(references, folder)
        learn_preferences(trainer, references)
    elif goal:
        LEARN[goal](trainer, models)
    batches = [_batches(goal) for _ in models]
    data = batches if virtual else batches[0]
    if output is not None:
        _log(trainer, output)
    with frameworks.counting_steps() as run.steps:
        for microbatches in MICROBATCHES:
            trainer.args.num_microbatches = microbatches
            metrics, norm, _ = trainer.train_step(data)
            _end_step(trainer, metrics)
            run.losses += [
                {key: number.flatten().tolist() for key, number in metric.items()} for metric in metrics
            ]
            run.norms.append(norm)
        evaluated = trainer.evaluate(data)
    if "loss" in evaluated:
        run.validation = [
            number
            for key in sorted(evaluated)
            for number in torch.as_tensor(evaluated[key]).flatten().tolist()
        ]
    run.weights = dict(global_parameters(models))
    return run


def _local_layers(loader: ModelLoader, vp_stage: int | None = None) -> Any:
    """Megatron's own layers in place of Transformer Engine's."""
    spec = get_gpt_decoder_block_spec(
        loader.config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
    )
    spec.layer_norm = WrappedTorchNorm
    return spec


def _by_local_name(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Convert the weights of Megatron's own layers, which have some other names."""

    def converted(bridge: GPTBridge, module: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        return convert(bridge, module, NORMS.get(key, key), *args, **kwargs)

    return converted


def _config(virtual: int | None) -> ModelConfig:
    return ModelConfig(
        hf_model_type="llama",
        hf_config=LLAMA,
        padded_vocab_size=LLAMA.vocab_size,
        num_layers=LLAMA.num_hidden_layers,
        hidden_size=LLAMA.hidden_size,
        ffn_hidden_size=LLAMA.intermediate_size,
        num_attention_heads=LLAMA.num_attention_heads,
        num_query_groups=LLAMA.num_key_value_heads,
        max_position_embeddings=LLAMA.max_position_embeddings,
        normalization="RMSNorm",
        add_qkv_bias=False,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        bf16=False,
        fp16=False,
        variable_seq_lengths=True,
        batch_p2p_comm=False,
        overlap_p2p_comm=False,
        # What follows are kernels for a GPU.
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        cross_entropy_loss_fusion=False,
    )


def _trainer(config: ModelConfig, models: list[torch.nn.Module]) -> MegatronTrainer:
    class Trainer(MegatronTrainer):
        def __init__(self) -> None:
            self.args = SimpleNamespace(
                pipeline_model_parallel_size=2,
                context_parallel_size=1,
                seq_length=LONGEST,
                micro_batch_size=1,
                global_batch_size=1,
                eval_iters=1,
                num_microbatches=0,
                task_type="causal_lm",
                padding_free=False,
                enable_dft_loss=False,
                enable_channel_loss=False,
                model_type="llama",
            )
            self.config = config
            self.enable_routing_replay = False
            self.eval_metrics = None
            self.callbacks: list[Any] = []
            self.state = SimpleNamespace(iteration=0)

        def on_log(self, logs: Any, prefix: str = "") -> None:
            if self.callbacks:  # else nobody reads a log
                super().on_log(logs, prefix)

    trainer = Trainer()
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    trainer.wrapped_models = [DistributedDataParallel(model.config, ddp, model) for model in models]
    trainer.optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=0.01, weight_decay=0.0, clip_grad=1e9, bf16=False, fp16=False),
        trainer.wrapped_models,
    )
    trainer.opt_param_scheduler = SimpleNamespace(step=lambda increment: None)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = trainer.optimizer.scale_loss
    config.calculate_per_token_loss = True
    return trainer


def _log(trainer: MegatronTrainer, output: str) -> None:
    """Let ms-swift's own callbacks write what each step logs into the folder ``output``."""
    vars(trainer.args).update(
        output_dir=output,
        tensorboard_dir=output,
        tensorboard_queue_size=1,
        train_iters=len(MICROBATCHES),
        mtp_num_layers=None,
        dsa_indexer_loss_coeff=None,
    )
    trainer.callbacks = [PrintCallback(trainer), TensorboardCallback(trainer)]
    trainer.call_event("on_train_begin")


def _end_step(trainer: MegatronTrainer, metrics: list[dict[str, torch.Tensor]]) -> None:
    """Log the step, as ms-swift does where it logs each of them."""
    trainer.state.iteration += 1
    if trainer.callbacks:
        logs: dict[str, Any] = {}
        trainer._aggregated_metrics(metrics, logs)
        trainer.on_log(logs=logs)


def _batches(goal: str) -> Iterator[dict[str, Any]]:
    """Microbatches of lengths that vary."""
    draw = torch.Generator().manual_seed(7)
    while True:
        length = LONGEST - 8 * int(torch.randint(0, 3, (1,), generator=draw))
        samples = SAMPLES.get(goal, 1)
        tokens = torch.randint(0, LLAMA.vocab_size, (samples, length), generator=draw)
        yield {
            "input_ids": tokens,
            "labels": torch.tensor([1, 0, 0]) if goal == RANKING else tokens.clone(),
            "position_ids": torch.arange(length)[None],
            "attention_mask": torch.triu(torch.ones(1, 1, length, length), 1).bool(),
            **({"channel": [f"of {length} tokens"]} if goal == CHANNELS else {}),
        }
