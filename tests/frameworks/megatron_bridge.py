"""Train with Megatron-Bridge's own ``pretrain()`` on forked ranks, and look inside.

run = under("v-half", Job(chunks=2))      # losses, norms, weights by global name
assert_same_bits(run, stock(Job()))
"""

import builtins
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import megatron.bridge.training.config as config
import megatron.bridge.training.eval
import megatron.bridge.training.pretrain
import megatron.bridge.training.train
import pytest
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.gpt.gpt_builder import GPTModelConfig
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.transformer_config import TransformerConfig
from megatron.bridge.training.gpt_step import forward_step
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.enums import AttnBackend

import megatron_pp_ext
from megatron_pp_ext import cpu
from tests.frameworks.adapters import Adapters, Export
from tests.support import frameworks, ranks, rounding
from tests.support.training import global_parameters, initialize_by_layer

FOR_A_CPU: dict[str, Any] = {
    "pipeline_dtype": torch.float32,
    "use_cpu_initialization": True,
    "attention_backend": AttnBackend.unfused,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "cross_entropy_loss_fusion": False,
}
"""Settings of a model without kernels for a GPU."""

TRANSFORMER: dict[str, Any] = FOR_A_CPU | {
    "num_layers": 8,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "add_bias_linear": False,
}


@dataclass(frozen=True)
class Job:
    """A tiny training run in Bridge's words."""

    pipeline_ranks: int = 2
    chunks: int = 1
    world_size: int = 2
    microbatches: int = 8
    steps: int = 3
    is_tied: bool = False
    builder: bool = False
    """Whether the model is made by a builder, Bridge's newer way, or by a provider."""
    overlaps: bool = False
    """Whether data parallelism overlaps with the backward, with a distributed optimizer."""
    gathers_early: bool = False
    """Whether chunk 0's weights are gathered while those of the other chunks are updated."""
    evaluations: int = 0
    experts_in: tuple[int, ...] = ()
    """A 1 for each layer that has experts."""
    predicts: bool = False
    """Whether the last stage has multi-token prediction."""
    step: Callable[..., Any] = forward_step
    layers: Callable[..., Any] | None = None
    """The layers of a chunk, if not those of ``layers_of``."""
    adapts: str | None = None
    """The folder of Hugging Face weights of which adapters alone are trained; they are saved and exported in
    that format too."""
    save: str | None = None
    load: str | None = None
    log: str | None = None
    """The folder of TensorBoard's files."""


@dataclass
class Run:
    """What one rank saw."""

    losses: list[dict[str, float]] = field(default_factory=list)  # by name, a step; on the last pipeline rank
    norms: list[float] = field(default_factory=list)  # of the gradients of a step
    validation: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # at the end, by global name
    exported: dict[str, torch.Tensor] = field(default_factory=dict)  # at the end, in Hugging Face's names
    layers: list[list[int]] = field(default_factory=list)  # of each chunk
    steps: list[int] = field(default_factory=list)  # microbatches of each step that our runner did
    printed: list[str] = field(default_factory=list)  # the line of each iteration, on the last rank


@cache
def stock(job: Job) -> Run:
    """Train with nothing installed, under stock's 1F1B."""
    return _run(replace(job, chunks=1), None)


def under(name: str, job: Job, *, has_numbers: bool = True, **about: Any) -> Run:
    """Train under the schedule that ``install(name, ..., **about)`` puts into each rank.

    Unless the log ``has_numbers`` of the pipeline, the call leaves them out.
    """

    def install() -> None:
        result = megatron_pp_ext.install(
            name, ranks=job.pipeline_ranks, microbatches=job.microbatches, **about
        )
        if not has_numbers:
            result.without_log()

    run = _run(job, install)
    assert run.steps[:1] == [job.microbatches], "stock's schedule ran"
    return run


def assert_same_bits(ours: Run, theirs: Run) -> None:
    """Losses and weights to the last bit; norms, whose sum goes by rank, within its rounding."""
    assert ours.losses == theirs.losses
    assert ours.validation == theirs.validation
    assert ours.norms == pytest.approx(theirs.norms, rel=rounding.relative())
    assert ours.weights.keys() == theirs.weights.keys()
    assert [
        name for name, weight in ours.weights.items() if not torch.equal(weight, theirs.weights[name])
    ] == []


def _run(job: Job, install: Callable[[], None] | None) -> Run:
    runs = ranks.run_ranks(_pretrain, job.world_size, job, install)
    last = next(run for run in reversed(runs) if run.losses)
    for run in runs:
        assert run.losses in ([], last.losses)
        assert run.norms == last.norms
        for name, weight in run.weights.items():
            assert torch.equal(last.weights.setdefault(name, weight), weight), name
    return last


def _pretrain(rank: int, job: Job, install: Callable[[], None] | None) -> Run:
    run = Run()
    _listen(run)
    if install is not None:
        install()
    cpu.fork_checkpoint_writers(["--save", job.save or "", "--async-strategy", "mcore"])
    for module, name, watch in (
        (megatron.bridge.training.train, "train_step", _watch_step),
        (megatron.bridge.training.eval, "evaluate", _watch_evaluation),
    ):
        setattr(module, name, watch(run, getattr(module, name)))
    with frameworks.counting_steps() as run.steps:
        megatron.bridge.training.pretrain.pretrain(
            _container(job, run),
            job.step,
            callbacks=[Export(job.adapts, run.exported)] if job.adapts else None,
        )
    run.weights = {name: weight.detach().clone() for name, weight in run.weights.items()}
    return run


def _container(job: Job, run: Run) -> config.ConfigContainer:
    sizes = {
        "pipeline_model_parallel_size": job.pipeline_ranks,
        "virtual_pipeline_model_parallel_size": job.chunks if job.chunks > 1 else None,
    }
    transformer = {**TRANSFORMER, **sizes}
    if job.experts_in:
        transformer |= {
            "num_moe_experts": 4,
            "moe_layer_freq": list(job.experts_in),
            "moe_router_topk": 2,
            "moe_grouped_gemm": False,
            "moe_token_dispatcher_type": "alltoall",
        }
    if job.predicts:
        transformer |= {"mtp_num_layers": 1, "transformer_impl": "local"}
    about = {
        "seq_length": 32,
        "vocab_size": 64,
        "share_embeddings_and_output_weights": job.is_tied,
        "position_embedding_type": "rope",
    }
    model: Any
    if job.adapts is not None:
        model = AutoBridge.from_hf_pretrained(job.adapts).to_megatron_provider(load_weights=False)
        for name, value in (FOR_A_CPU | sizes).items():
            setattr(model, name, value)
        model.transformer_layer_spec, model.seq_length = layers_of, about["seq_length"]
    elif job.builder:
        model = GPTModelConfig(
            transformer=TransformerConfig(**transformer), transformer_layer_spec=_layers_of_builder, **about
        )
        model.transformer.seq_length = model.seq_length  # Bridge's warm-up of kernels reads it there
        model.pre_wrap_hooks.append(partial(_look, run))
    else:
        model = GPTModelProvider(**transformer, transformer_layer_spec=job.layers or layers_of, **about)
        model.register_pre_wrap_hook(partial(_look, run))
    return config.ConfigContainer(
        model=model,
        train=config.TrainingConfig(
            train_iters=job.steps,
            global_batch_size=job.microbatches * job.world_size // job.pipeline_ranks,
            micro_batch_size=1,
        ),
        validation=config.ValidationConfig(eval_interval=2, eval_iters=job.evaluations),
        # The limit is never reached: the norm, whose sum goes by rank, is computed and changes no weight.
        optimizer=config.OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            min_lr=0.01,
            weight_decay=0.0,
            clip_grad=1e9,
            bf16=False,
            fp16=False,
            use_distributed_optimizer=job.overlaps,
            overlap_param_gather_with_optimizer_step=job.gathers_early,
        ),
        scheduler=config.SchedulerConfig(
            lr_decay_style="constant",
            lr_warmup_iters=0,
            lr_decay_iters=100,
            start_weight_decay=0.0,
            end_weight_decay=0.0,
            weight_decay_incr_style="constant",
            override_opt_param_scheduler=bool(job.load),
        ),
        ddp=DistributedDataParallelConfig(
            overlap_grad_reduce=job.overlaps,
            overlap_param_gather=job.overlaps,
            use_distributed_optimizer=job.overlaps,
            grad_reduce_in_fp32=True,
        ),
        dataset=config.MockGPTDatasetConfig(
            seq_length=32,
            random_seed=1234,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            num_workers=0,
            dataloader_type="single",
            persistent_workers=False,
        ),
        logger=config.LoggerConfig(log_interval=1, tensorboard_dir=job.log),
        tokenizer=config.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=63),
        checkpoint=config.CheckpointConfig(
            save=job.save,
            load=job.load,
            save_interval=100,
            ckpt_format="torch_dist",
            async_save=False,
            pretrained_checkpoint=job.adapts,
            also_save_hf_checkpoint=job.adapts is not None,
        ),
        peft=None if job.adapts is None else Adapters(run.weights),
        rng=config.RNGConfig(seed=1234),
        dist=config.DistributedInitConfig(distributed_backend="gloo"),
        mixed_precision=None,
    )


def layers_of(config: Any, vp_stage: int | None = None) -> Any:
    """Return the layers of one chunk, as Bridge asks a provider for them."""
    return get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )


def _layers_of_builder(config: Any, vp_stage: int | None = None) -> Any:
    return layers_of(config.transformer, vp_stage)


def _look(run: Run, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Set the weights by layer, and keep the chunks until their last weights are copied."""
    initialize_by_layer(chunks)
    run.layers = [[layer.layer_number for layer in chunk.decoder.layers] for chunk in chunks]
    run.weights.update(global_parameters(chunks))
    return chunks


def _listen(run: Run) -> None:
    """Note the lines of iterations that this process prints from now on."""
    stock_print = builtins.print

    def listening(*texts: Any, **options: Any) -> None:
        stock_print(*texts, **options)
        run.printed += [str(text) for text in texts if " iteration " in str(text)]

    builtins.print = listening


def _watch_step(run: Run, step: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if result[0]:
            run.losses.append({name: loss.item() for name, loss in result[0].items()})
        run.norms.append(result[5])
        return result

    return watched


def _watch_evaluation(run: Run, evaluate: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        if result[0]:
            run.validation.append({name: loss.item() for name, loss in result[0].items()})
        return result

    return watched
