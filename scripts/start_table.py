"""Write what the installed Megatron says at its start to drawn flags, into the table that a test reads.

    python -m scripts.start_table [ROWS [SEED]]

Each row has flags of a small model, on eight ranks, and the error of Megatron's own parser, ``validate_args``
and the model's config; an empty text where it starts.  Megatron sees a Hopper GPU with a new Transformer
Engine.
"""

import contextlib
import io
import json
import logging
import os
import random
import shlex
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from megatron_pp_ext import cpu

cpu.install()  # before anything imports Megatron

from megatron.core.models.common.embeddings import rope_utils  # noqa: E402
from megatron.core.transformer import transformer_config  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.training import arguments  # noqa: E402
from megatron.training.argument_utils import core_transformer_config_from_args  # noqa: E402

from megatron_pp_ext.job import flag_effects, flag_table  # noqa: E402

FILE = Path(__file__).parents[1] / "reference" / "megatron_start.json"

WORLD = 8

_ANY = (
    "--hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --mock-data --train-iters 10 --lr 1e-4 --tokenizer-type NullTokenizer "
    "--vocab-size 1000 --untie-embeddings-and-output-weights"
)
_NEW = "--bf16 --position-embedding-type rope --swiglu --disable-bias-linear --pipeline-model-parallel-size 2"
MODELS = {
    "dense": f"{_ANY} --num-layers 8 {_NEW} --normalization RMSNorm --tensor-model-parallel-size 2 "
    "--sequence-parallel --global-batch-size 16",
    "plain": f"{_ANY} --num-layers 8 --fp16 --pipeline-model-parallel-size 4 --global-batch-size 16 "
    "--group-query-attention --num-query-groups 4",
    "experts": f"{_ANY} --num-layers 8 {_NEW} --num-experts 8 --moe-ffn-hidden-size 512 --global-batch-size "
    "32 --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall --moe-grouped-gemm "
    "--use-distributed-optimizer --overlap-grad-reduce",
    "latent": f"{_ANY} --num-layers 8 {_NEW} --multi-latent-attention --q-lora-rank 256 --global-batch-size "
    "32 --mtp-num-layers 1 --fp8-format hybrid",
    "fp32": f"{_ANY} --num-layers 8 --global-batch-size 16 --transformer-impl local "
    "--tensor-model-parallel-size 2",
    "hybrid": f"{_ANY} --bf16 --global-batch-size 16 --hybrid-layer-pattern M-*-M-M- "
    "--position-embedding-type none --pipeline-model-parallel-size 2",
}

_TEXTS = {
    "hybrid_layer_pattern": ["*-*-*-*-"],
    "hybrid_override_pattern": ["*-*-*-*-"],
    "pipeline_model_parallel_layout": [
        "Et*3|t*5L", "Et*3|t*4L", "t*4|t*4L", "Et*4|t*4", "Et*4|mt*4L", "Et*4|t*4mL", "Et*4|t*4mmL",
    ],
    "moe_layer_freq": ["[0,1,1,1,1,1,1,1]", "2"],
    "step_batch_size_schedule": ["0:128"],
    "recompute_modules": ["layernorm", "mlp", "moe", "core_atn", "moe_act", "mla_up_proj"],
    "window_size": ["127,0"],
    "no_rope_freq": ["4", "3", "0"],
    "cp_comm_type": ["a2a"],
    "mrope_section": ["16 24 24"],
    "moe_router_load_balancing_type": ["none", "sinkhorn"],
    "hierarchical_context_parallel_sizes": ["2 2"],
}  # fmt: skip
"""Values of flags that take a text of some form."""

_NUMBERS = ("0", "1", "2", "4", "1024")

_OTHERS = ("config_encoded_json", "config_path", "spec", "te_precision_config_file", "yaml_cfg", "logits_")
"""Parts of the names of arguments that need a file, or code."""

_TOGETHER = (
    "recompute_granularity recompute_method recompute_num_layers recompute_modules recompute_activations "
    "distribute_saved_activations",
    "use_distributed_optimizer overlap_param_gather overlap_grad_reduce optimizer_cpu_offload optimizer "
    "exp_avg_dtype fp8_param_gather fp8 fp8_recipe",
    "num_experts moe_router_num_groups moe_router_group_topk moe_router_topk moe_shared_expert_overlap "
    "moe_shared_expert_intermediate_size moe_token_dispatcher_type moe_ffn_hidden_size add_bias_linear",
    "pipeline_model_parallel_layout num_virtual_stages_per_pipeline_rank mtp_num_layers "
    "num_layers_per_virtual_pipeline_stage decoder_first_pipeline_num_layers position_embedding_type "
    "account_for_embedding_in_pipeline_split",
    "group_query_attention num_query_groups multi_latent_attention q_lora_rank swiglu squared_relu",
)
"""Arguments that Megatron compares with each other, which are drawn together."""


def drawn(rows: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield the name of a model and flags to add to it, half of them of arguments that belong together."""
    random_numbers = random.Random(seed)
    table = [row for row in flag_table.installed() if row["dest"] in flag_effects.described()]
    table = [row for row in table if not any(part in row["dest"] for part in _OTHERS)]
    for number in range(rows):
        names = random_numbers.choice(_TOGETHER).split() if number % 2 else None
        some = [row for row in table if names is None or row["dest"] in names]
        chosen = random_numbers.sample(some, random_numbers.randint(1, 3 if names else 2))
        words = " ".join(" ".join(_word(row, random_numbers)) for row in chosen)
        yield random_numbers.choice(list(MODELS)), words


def _word(row: flag_table.Row, random_numbers: random.Random) -> list[str]:
    if "sets" in row:
        return [row["flags"][0]]
    is_number = row.get("type") in ("int", "float", "pattern")
    values = _TEXTS.get(row["dest"]) or row.get("choices") or (_NUMBERS if is_number else ["x"])
    return [row["flags"][0], str(random_numbers.choice(values))]


@contextlib.contextmanager
def on_a_gpu() -> Iterator[None]:
    """Let Megatron find a Hopper GPU and Transformer Engine, as far as its checks look for them."""
    with contextlib.ExitStack() as stack:
        patch = mock.patch.object
        for module in (arguments, transformer_config):
            stack.enter_context(patch(module, "is_te_min_version", lambda *version, **how: True))
        stack.enter_context(patch(arguments, "get_device_arch_version", lambda: 9))
        stack.enter_context(mock.patch("torch.cuda.get_device_capability", lambda *device: (9, 0)))
        stack.enter_context(patch(rope_utils, "fused_apply_rotary_pos_emb", object()))
        for name in (
            "fused_permute", "fused_permute_with_probs", "fused_unpermute", "fused_sort_chunks_by_index",
            "fused_sort_chunks_by_index_with_probs",
        ):  # fmt: skip
            stack.enter_context(patch(moe_utils, name, object()))
        ours = {"WORLD_SIZE": str(WORLD), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        stack.enter_context(mock.patch.dict(os.environ, ours))
        yield


def said(flags: str) -> str:
    """Return the error with which Megatron ends, in one line; empty where it starts."""
    # What this package adds to the validation is not asked here.
    validate = getattr(arguments.validate_args, "__wrapped__", arguments.validate_args)
    output = io.StringIO()
    quiet = contextlib.redirect_stdout(output), contextlib.redirect_stderr(output)
    with mock.patch.object(sys, "argv", ["train.py", *shlex.split(flags)]), quiet[0], quiet[1]:
        try:
            args = arguments.parse_args()
            validate(args)
            core_transformer_config_from_args(args)
        except SystemExit:
            return output.getvalue().strip().splitlines()[-1][-100:]
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())}"[:100]
    return ""


def rows_of_megatron(rows: int, seed: int) -> list[tuple[str, str, str]]:
    """Return drawn rows: the model, the flags and what Megatron says."""
    with on_a_gpu():
        return [(model, flags, said(f"{MODELS[model]} {flags}")) for model, flags in drawn(rows, seed)]


def main(rows: int = 400, seed: int = 1) -> None:
    """Write the table."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    lines = ",\n  ".join(map(json.dumps, rows_of_megatron(rows, seed)))
    models = json.dumps(MODELS, indent=1)
    FILE.write_text(
        f'{{"world": {WORLD}, "models": {models},\n "rows": [\n  {lines}\n ]}}\n', encoding="utf-8"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
