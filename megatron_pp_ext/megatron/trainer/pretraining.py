"""The calls of a pre-training script that differ between Megatron's releases.

A checkout's script fits its own release; ours, which runs on the wheel alone, has to fit all of them.  What
Megatron's functions take tells them apart, since a development version has the number of a later release.
"""

import inspect
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import arguments, get_args, pretrain

from megatron_pp_ext.job.layers import predicting_stage
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.megatron.trainer.agreement import refused

DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}

# These flags change the model in ways that provide_gpt does not support.
NOT_PROVIDED = (
    "spec",
    "heterogeneous_layers_config_path",
    "experimental_attention_variant",
    "use_legacy_models",
    "yaml_cfg",
)


def pretrain_gpt(
    datasets: Callable[..., Any],
    forward_step: Callable[..., Any],
    refuse: Sequence[str],
    require_data: Callable[[Namespace], None],
) -> None:
    """Pre-train the GPT of sys.argv on ``datasets(samples, vp_stage)`` by ``forward_step(data, model)``.

    ``refuse`` holds the names of arguments that must not be set, and ``require_data(args)`` raises ValueError
    for data that cannot be trained on.  Either ends the process with one line, before process groups exist.
    """
    model_type = ModelType.encoder_or_decoder
    parameters = inspect.signature(pretrain).parameters
    if "cfg_container" not in parameters:  # before 0.18
        args = arguments.parse_args()
        _refuse(args, (*refuse, *NOT_PROVIDED))
        _require_data(args, require_data)
        pretrain(
            datasets,
            provide_gpt,
            model_type,
            forward_step,
            args_defaults=DEFAULTS,
            get_embedding_ranks=embedding_ranks,
        )
        return
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    args = arguments.parse_and_validate_args(args_defaults=DEFAULTS)
    _require_data(args, require_data)
    if parameters["model_provider"].default is inspect.Parameter.empty:  # before 0.19
        _refuse(args, (*refuse, *NOT_PROVIDED))
        config = pretrain_cfg_container_from_args(args)
        pretrain(config, datasets, provide_gpt, model_type, forward_step, get_embedding_ranks=embedding_ranks)
        return
    from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args

    _refuse(args, refuse)
    model_config = hybrid_config_from_args if args.hybrid_layer_pattern else gpt_config_from_args
    config = pretrain_cfg_container_from_args(args, model_config(args))
    pretrain(config, datasets, model_type, forward_step, get_embedding_ranks=embedding_ranks)


def _require_data(args: Namespace, require: Callable[[Namespace], None]) -> None:
    """End the process with one line if there is no data to train on; rank 0 looks for all."""
    if args.rank:
        return
    try:
        require(args)
    except ValueError as error:
        raise refused(error) from error


def _refuse(args: Namespace, names: Sequence[str]) -> None:
    for name in names:
        if getattr(args, name, None):
            raise refused(
                f"--{name.replace('_', '-')} is not supported by megatron_pp_ext.pretrain_gpt; start a "
                "checkout's pretrain_gpt.py with python -m megatron_pp_ext"
            )


def provide_gpt(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Make one chunk of the GPT that Megatron's arguments describe; from 0.19 on Megatron does so itself.

    ``pre_process`` is whether it embeds the tokens, ``post_process`` whether it has the output layer.
    """
    args = get_args()
    config = config or arguments.core_transformer_config_from_args(args)
    engine = args.transformer_impl == "transformer_engine"
    layers: dict[str, Any] = {
        "config": config,
        "use_transformer_engine": engine,
        "normalization": args.normalization,
        "qk_l2_norm": args.qk_l2_norm,
    }
    mtp = None
    if args.mtp_num_layers:
        last_layer = get_gpt_decoder_layer_specs(**layers)[-1]
        mtp = get_gpt_mtp_block_spec(config, last_layer, use_transformer_engine=engine, vp_stage=vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(**layers, vp_stage=vp_stage),
        mtp_block_spec=mtp,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Return the ranks of a pipeline that hold the embedding, or a copy of it, under stock's placement.

    The output layer has a tied one, and MTP has one wherever it is.
    """
    job = Job.of(get_args())
    tied = [] if job.model.untie_embeddings_and_output_weights else [pp_ranks[-1]]
    stage = predicting_stage(job, len(pp_ranks))
    predicting = [] if stage is None else [pp_ranks[stage % len(pp_ranks)]]
    return sorted({pp_ranks[0], *tied, *predicting})


def predicts_here(vp_stage: int | None) -> bool:
    """Return whether chunk ``vp_stage`` of this rank has multi-token prediction, which embeds its tokens."""
    args, ranks = get_args(), mpu.get_pipeline_model_parallel_world_size()
    if not args.mtp_num_layers:  # asked for every microbatch, and reading the job takes a millisecond
        return False
    stages = ranks * (args.virtual_pipeline_model_parallel_size or 1)
    stage = (vp_stage or 0) * ranks + mpu.get_pipeline_model_parallel_rank()
    return predicting_stage(Job.of(args), stages) == stage


def part_of_context(batch: dict[str, Any]) -> dict[str, Any]:
    """Return of every tensor of ``batch`` [rows, tokens, ...] the tokens of this context-parallel rank."""
    parameters = inspect.signature(get_batch_on_this_cp_rank).parameters
    plain = {"is_hybrid_cp": False} if "is_hybrid_cp" in parameters else {}
    return get_batch_on_this_cp_rank(batch, **plain, cp_group=mpu.get_context_parallel_group())
