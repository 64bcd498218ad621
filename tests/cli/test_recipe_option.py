"""``mpp estimate --recipe``: a job from a function that returns what Megatron-Bridge's recipes return."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_pp_ext.planner import recipe as recipes

MODULE = "own_recipes"
NAME = "tiny_pretrain_16gpu_h200_bf16_config"


def silu() -> None:
    """Stands for the activation function, of which the name counts."""


@dataclass
class Provider:
    """The settings of a TransformerConfig, and of Bridge's provider of models, that are read."""

    num_layers: int = 16
    hidden_size: int = 1024
    num_attention_heads: int = 16
    num_query_groups: int = 4
    ffn_hidden_size: int = 4096
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 4
    context_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = 2
    pipeline_model_parallel_layout: str | None = None
    recompute_granularity: str | None = None
    cuda_graph_impl: str = "none"
    window_size: tuple[int, int] | None = None
    rotary_base: float = 500000.0
    normalization: str = "RMSNorm"
    gated_linear_unit: bool = True
    bias_activation_fusion: bool = True
    activation_func: Any = silu
    add_bias_linear: bool = False
    bf16: bool = False
    fp8: str | None = None
    tp_comm_overlap: bool = False
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: int = -1
    seq_length: int = 2048
    vocab_size: int | None = None
    position_embedding_type: str = "rope"
    share_embeddings_and_output_weights: bool = False


@dataclass
class DataParallel:
    """Bridge's settings of data parallelism that are read."""

    grad_reduce_in_fp32: bool = True
    overlap_grad_reduce: bool = False
    use_distributed_optimizer: bool = True
    data_parallel_sharding_strategy: str = "no_shard"


@dataclass
class Optimizer:
    """Bridge's settings of the optimizer that are read; a dtype is one of torch's, whose text counts."""

    optimizer: str = "adam"
    exp_avg_dtype: Any = None


class Dtype:
    """Stands for a torch.dtype."""

    def __str__(self) -> str:
        return "torch.bfloat16"


class Precision:
    """Sets the precision where Bridge does, in the parts of the job."""

    def finalize(self) -> None:
        """There is nothing to complete."""

    def setup(self, model: Provider, optimizer: Optimizer, parallel: DataParallel) -> None:
        """Set it."""
        model.bf16 = True
        parallel.grad_reduce_in_fp32 = False


class Overlap:
    """Overlaps reductions where there are several data-parallel ranks, as Bridge does."""

    data_parallel_size = 0

    def finalize(self) -> None:
        """There is nothing to complete."""

    def setup(self, model: Provider, optimizer: Optimizer, parallel: DataParallel) -> None:
        """Set it."""
        parallel.overlap_grad_reduce = self.data_parallel_size > 1


def get_mixed_precision_config(name: str) -> Precision:
    """Return the precision ``name``, as the module of Bridge's containers does."""
    assert name == "bf16_mixed"
    return Precision()


class Container(SimpleNamespace):
    """Stands for a ConfigContainer."""


def container(**model: Any) -> Container:
    """Return what a recipe returns, a ConfigContainer, of a model with these settings."""
    return Container(
        model=Provider(**model),
        optimizer=Optimizer(exp_avg_dtype=Dtype()),
        ddp=DataParallel(),
        train=SimpleNamespace(micro_batch_size=1, global_batch_size=64),
        tokenizer=SimpleNamespace(vocab_size=32000),
        dataset=SimpleNamespace(),
        peft=None,
        mixed_precision=Precision(),
        comm_overlap=Overlap(),
    )


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of recipes, which can be imported."""
    made = ModuleType(MODULE)
    functions: dict[str, Any] = {
        NAME: container,
        "alone_1gpu_h100_config": lambda: container(pipeline_model_parallel_size=1),
        "sized_config": lambda layers: container(num_layers=layers),
        "failing_config": lambda: {}["sizes"],
        "other_config": lambda: SimpleNamespace(),
    }
    for name, function in functions.items():
        setattr(made, name, function)

    monkeypatch.setitem(sys.modules, MODULE, made)
    yield made


def test_all_of_a_recipe_is_taken() -> None:
    recipe = recipes.read(f"{MODULE}:{NAME}")
    assert (recipe.gpus, recipe.device, recipe.system) == (16, "h200", "h200")
    expected = {
        "num_layers": 16,
        "pipeline_model_parallel_size": 4,
        "num_virtual_stages_per_pipeline_rank": 2,
        "group_query_attention": True,
        "num_query_groups": 4,
        "swiglu": True,
        "vocab_size": 32000,
        "rotary_base": 500000,
        "bf16": True,  # which its precision sets
        "grad_reduce_in_bf16": True,
        "overlap_grad_reduce": True,  # which its overlap sets for 4 data-parallel ranks
        "exp_avg_dtype": "bf16",
        "global_batch_size": 64,
        "untie_embeddings_and_output_weights": True,
    }
    assert {name: recipe.arguments.get(name) for name in expected} == expected
    # These have values that mean nothing here.
    assert not {"wgrad_deferral_limit", "data_parallel_sharding_strategy"} & recipe.arguments.keys()


def test_values_are_those_of_flags(module: ModuleType) -> None:
    setattr(
        module, NAME, lambda: container(window_size=(127, 0), pipeline_model_parallel_layout="Et*2|(t*2|)*7L")
    )
    arguments = recipes.read(f"{MODULE}:{NAME}").arguments
    assert arguments["window_size"] == "127,0"
    # The layout has the chunks: Bridge's config has both, of which a command line takes one.
    assert "num_virtual_stages_per_pipeline_rank" not in arguments


def test_a_precision_may_be_a_name(module: ModuleType) -> None:
    made = container()
    made.mixed_precision = "bf16_mixed"
    setattr(module, NAME, lambda: made)
    assert recipes.read(f"{MODULE}:{NAME}").arguments["bf16"]


def test_estimate_reads_a_recipe(mpp, tmp_path) -> None:
    file = tmp_path / "estimate.json"
    result = mpp("estimate", "--recipe", f"{MODULE}:{NAME}", "--json", file)
    assert result.exit_code == 0, result.output
    assert "interleaved on 16 x h200, 4 data-parallel, 16 microbatches" in result.output
    assert "it has Megatron's own schedule" in result.output
    content = json.loads(file.read_text())
    assert content["call"] is None
    assert content["megatron"] is None


def test_flags_replace_what_a_recipe_sets_and_a_call_is_printed(mpp, module, tmp_path) -> None:
    setattr(module, NAME, lambda: container(cuda_graph_impl="transformer_engine"))
    file = tmp_path / "estimate.json"
    flags = ["--pipeline-schedule", "v-half", "--pipeline-unproved", "--global-batch-size", 32]
    result = mpp("estimate", "--recipe", f"{MODULE}:{NAME}", "--json", file, "--", *flags)
    assert result.exit_code == 0, result.output
    assert "stock 1F1B" in result.output
    call = "megatron_pp_ext.install('v-half', ranks=4, microbatches=8, unproved=True)"
    assert call in result.output
    content = json.loads(file.read_text())
    assert content["call"] == call
    assert content["settings"]["virtual_pipeline_model_parallel_size"] == 2


def test_stages_of_a_recipe_give_way_to_those_of_a_schedule(mpp, module) -> None:
    layout = "Et*4|" + "t*4|" * 2 + "t*4L"
    setattr(module, NAME, lambda: container(pipeline_model_parallel_layout=layout))
    kept = mpp("estimate", "--recipe", f"{MODULE}:{NAME}", "--", "--pipeline-schedule", "zb-h1")
    assert kept.exit_code == 0, kept.output
    assert f"config.model.pipeline_model_parallel_layout = {layout!r}" in kept.output
    other = mpp("estimate", "--recipe", f"{MODULE}:{NAME}", "--", "--pipeline-schedule", "v-half")
    assert other.exit_code == 0, other.output
    assert f"its own stages are left out (--pipeline-model-parallel-layout {layout})" in other.output
    assert "config.model.pipeline_model_parallel_layout = None" in other.output


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_recipes", "--recipe is own_recipes: give MODULE:FUNCTION"),
        ("no_such_recipes:config", "there is no module no_such_recipes"),
        (f"{MODULE}:{NAME[:-1]}", f"has no function {NAME[:-1]}: did you mean '{NAME}'?"),
        (f"{MODULE}:sized_config", "needs arguments (layers)"),
        (f"{MODULE}:failing_config", "fails: 'sizes'"),
        (f"{MODULE}:alone_1gpu_h100_config", "has no pipeline, but pipeline_model_parallel_size 1"),
        (f"{MODULE}:other_config", "returns SimpleNamespace without model"),
    ],
)
def test_what_is_no_recipe_ends_in_one_line(mpp, name: str, words: str) -> None:
    result = mpp("estimate", "--recipe", name)
    assert result.exit_code == 2
    (line,) = result.output.strip().splitlines()
    assert words in line


def test_without_bridge_its_recipes_say_what_to_install(mpp, monkeypatch) -> None:
    monkeypatch.setattr(recipes, "_has_bridge", lambda: False)
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)
    result = mpp("estimate", "--recipe", "megatron.bridge.recipes.llama.h100.llama3:llama3_config")
    assert result.exit_code == 2
    assert "needs Megatron-Bridge: pip install megatron-bridge" in result.output


def test_a_recipe_has_a_model(mpp) -> None:
    result = mpp("estimate", "--recipe", f"{MODULE}:{NAME}", "--model", "llama3-8b")
    assert result.exit_code == 2
    assert "leave one out" in result.output
