"""Evaluate Megatron-Bridge's recipes; store what those with a pipeline set in reference/pipelined_recipes.

python -m scripts.bridge_recipes                   the installed Megatron-Bridge
python -m scripts.bridge_recipes CHECKOUT          that of a checkout, with the installed megatron.core
python -m scripts.bridge_recipes --configs FOLDER  with config.json files of Hugging Face there, which are
                                                   called ORGANIZATION--NAME.json

It needs the environment of `make test-frameworks`, and neither a GPU nor a network: packages that a GPU needs
have stand-ins, and a model's config.json is one of `mpp models`, or in the folder.  Without it a recipe is
counted as not evaluated.
"""

import argparse
import functools
import importlib
import inspect
import json
import logging
import os
import pkgutil
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata, resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support import absent_packages

_MORE = (
    *("apex", "causal_conv1d", "comet_ml", "diffusers", "fla", "flashinfer", "imageio", "mamba_ssm"),
    *("mistral_common", "mlflow", "modelscope", "open_clip", "qwen_vl_utils", "timm", "wandb", "webdataset"),
)
"""What recipes import besides, which no test needs."""

absent_packages.PACKAGES.update(dict.fromkeys(_MORE, "of models and reports"))

from tests.support import frameworks  # noqa: E402, F401  (Megatron, before the stand-ins are there)

# isort: split
import megatron.core.utils  # noqa: E402
import packaging.version  # noqa: E402
import torch  # noqa: E402

from megatron_pp_ext.job import flag_effects  # noqa: E402
from megatron_pp_ext.planner import recipe as recipes  # noqa: E402

FOLDER = Path(__file__).parents[1] / "reference" / "pipelined_recipes"

ROOTS = "megatron.bridge.perf_recipes", "megatron.bridge.recipes"

SHIPPED = {
    "Qwen/Qwen3-235B-A22B": "qwen3-235b",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "qwen3-next-80b",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3-Base": "deepseek-v3",
    "meta-llama/Meta-Llama-3-8B": "llama3-8b",
    "meta-llama/Meta-Llama-3.1-8B": "llama3-8b",
    "meta-llama/Meta-Llama-3-70B": "llama3-70b",
    "meta-llama/Meta-Llama-3.1-70B": "llama3-70b",
    "meta-llama/Meta-Llama-3.1-405B": "llama3-405b",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "moonshotai/Kimi-K2-Instruct": "kimi-k2",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "zai-org/GLM-4.5": "glm-4.5",
}
"""The models of `mpp models` by their names at Hugging Face, and those of the same sizes."""

ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "kimi_k2": "KimiK2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}
"""The classes of models by their types, which the shipped configurations leave out."""


_TYPES = {"kimi_k2": "deepseek_v3"}
"""The types of models that transformers reads, by those of which a repository has the code."""

ENGINE = "2.20"
"""The version of Transformer Engine that recipes are evaluated for."""

_IS_RECIPE = re.compile(r"^[^_].*_\d+gpu_.*_config$")
"""Matches the names of recipes, which have their GPUs; other functions are helpers, and older names."""


SIZES = {
    "num_layers": 96,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "ffn_hidden_size": 32768,
    "num_moe_experts": 128,
    "moe_ffn_hidden_size": 2048,
    "moe_router_topk": 8,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
    "vocab_size": 131072,
    "seq_length": 4096,
}
"""The sizes that stand in for those of a model without a config.json; no row has them."""


class NoConfig(OSError):
    """A model whose config.json is not here."""


def main() -> None:
    """Read the command line and write the file of a version."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", nargs="?", type=Path)
    parser.add_argument("--configs", type=Path)
    parser.add_argument("--version", help="the name of the file  [default: Bridge's own version]")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the file is written")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if options.checkout is not None:
        megatron.__path__ = [str(options.checkout / "src" / "megatron"), *megatron.__path__]
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), options.configs)
        _stand_in_for_unknown_models()
        content = evaluated()
    content = {"version": options.version or _version(options.checkout), **content}
    options.folder.mkdir(exist_ok=True)
    file = options.folder / f"{content['version']}.json"
    file.write_text(_text(content))
    print(f"{file}: {len(content['recipes'])} recipes with a pipeline of {content['evaluated']} evaluated")
    for name, reason in content["not_evaluated"].items():
        print(f"not evaluated: {name}: {reason}")


def prepare(folder: Path, configs: Path | None = None) -> None:
    """Let this process call recipes: without a GPU and what needs one, without a network.

    The config.json files that recipes ask for are written to ``folder``; ``configs`` may have more of them.
    """
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"  # else transformers asks for a config.json's companions, for minutes
    absent_packages.put_in_place()
    torch.cuda.is_available = lambda: False  # else recipes go by the GPU that they find here
    megatron.core.utils._te_version = packaging.version.Version(ENGINE)
    _configs_from(folder, configs)


def _version(checkout: Path | None) -> str:
    if checkout is None:
        return metadata.version("megatron-bridge")
    from megatron.bridge import package_info

    return str(package_info.__shortversion__)


def evaluated() -> dict[str, Any]:
    """Return the recipes with a pipeline, how many were evaluated, and why others were not."""
    rows, failures, count = [], {}, 0
    for name, function in _functions():
        try:
            container = function()
            row = _row(name, container)
        except Exception as error:
            failures[_short(name)] = _reason(error)
            continue
        count += 1
        if row is not None:
            rows.append(row)
    return {"evaluated": count, "not_evaluated": failures, "recipes": rows}


def _functions() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield all recipes by MODULE:FUNCTION, where they are defined."""
    for root in ROOTS:
        package = importlib.import_module(root)
        for entry in pkgutil.walk_packages(package.__path__, f"{root}."):
            module = importlib.import_module(entry.name)
            for attribute, function in sorted(vars(module).items()):
                is_own = inspect.isfunction(function) and function.__module__ == entry.name
                if is_own and _IS_RECIPE.search(attribute):
                    yield f"{entry.name}:{attribute}", function


def _row(name: str, container: Any) -> dict[str, Any] | None:
    model = container.model
    if getattr(model, "pipeline_model_parallel_size", 1) < 2:
        return None
    if name.startswith(ROOTS[0]):
        _as_scripts_do(container)
    recipe = recipes.of_container(name, container)
    unknown = getattr(model, "without_config", None)
    left_out = _without_effect() | (_OF_MODEL if unknown else set())
    arguments = {key: value for key, value in recipe.arguments.items() if key not in left_out}
    return {
        "recipe": _short(name),
        "gpus": recipe.gpus,
        "device": recipe.device,
        "without_config": unknown,
        "notes": list(recipe.notes),
        "arguments": arguments,
    }


_OF_MODEL = {*SIZES, "num_experts", "max_position_embeddings"} - {
    "seq_length",
    "moe_token_dispatcher_type",
    "add_bias_linear",
}
"""The arguments that a model's config.json has."""


@functools.cache
def _without_effect() -> set[str]:
    """Return the arguments without effect on a step, which no rule asks for either."""
    return {name for names in flag_effects.table()["without_effect"].values() for name in names.split()}


def _as_scripts_do(container: Any) -> None:
    """Set what Bridge's scripts/performance/run_script.py sets in every recipe that it runs.

    What scripts of older releases set besides (overlap_param_gather_with_optimizer_step) is in the recipes
    themselves since 0.6.
    """
    optimizer, precision = container.optimizer, container.mixed_precision
    is_bf16 = "bf16" in precision if isinstance(precision, str) else not (precision.fp8 or precision.fp4)
    if is_bf16 and optimizer.optimizer == "adam":
        optimizer.use_precision_aware_optimizer = True


def _short(name: str) -> str:
    return name.removeprefix("megatron.bridge.")


def _reason(error: BaseException) -> str:
    cause = _cause(error)
    if isinstance(cause, OSError) and cause.filename:
        return f"no file {Path(cause.filename).name}"  # not where, which is a matter of the machine
    words = " ".join(str(cause).split())
    words = words.partition("Megatron-Bridge cannot start it: ")[2] or words
    return words if isinstance(cause, NoConfig | ValueError) else f"{type(cause).__name__}: {words}"


def _configs_from(folder: Path, more: Path | None) -> None:
    """Let transformers read a model's configuration from ``folder``, where files are written, or ``more``."""
    from transformers import AutoConfig

    load = AutoConfig.from_pretrained

    def from_files(name: Any, *args: Any, **kwargs: Any) -> Any:
        place = folder / str(name).replace("/", "--")
        if not place.is_dir() and not Path(str(name)).is_dir():
            content = _config(str(name), more)
            place.mkdir()
            (place / "config.json").write_text(json.dumps(content))
        return load(place if place.is_dir() else name, *args, **kwargs)

    AutoConfig.from_pretrained = functools.wraps(load)(from_files)


def _stand_in_for_unknown_models() -> None:
    """Let recipes set what they set in a model of ``SIZES`` where there is no config.json of theirs."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    load = AutoBridge.from_hf_pretrained

    def or_unknown(path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return load(path, *args, **kwargs)
        except ValueError as error:
            if not isinstance(_cause(error), NoConfig):
                raise
        provider = GPTModelProvider(**SIZES)
        provider.without_config = str(path)
        make = lambda *args, **kwargs: provider  # noqa: E731
        return SimpleNamespace(to_megatron_provider=make, get_model_config=make)

    AutoBridge.from_hf_pretrained = or_unknown


def _cause(error: BaseException) -> BaseException:
    """Return the first one of the errors that led to ``error`` which says that a config.json is missing."""
    chain: BaseException | None = error
    while chain is not None and not isinstance(chain, NoConfig):
        chain = chain.__cause__ or chain.__context__
    return chain or error


def _config(name: str, folder: Path | None) -> Any:
    file = None if folder is None else folder / f"{name.replace('/', '--')}.json"
    if name in SHIPPED:
        shipped = resources.files("megatron_pp_ext.planner") / "models" / f"{SHIPPED[name]}.json"
        content = json.loads(shipped.read_text())["config"]
        named = {"architectures": [ARCHITECTURES[content["model_type"]]]}
        return content | named | {"model_type": _TYPES.get(content["model_type"], content["model_type"])}
    if file is not None and file.is_file():
        return json.loads(file.read_text())
    # These words let Bridge not try again.
    raise NoConfig(f"entry not found: config.json of {name}")


def _text(content: dict[str, Any]) -> str:
    """Return ``content`` as JSON with a line for each recipe, without what all of them have."""
    rows = content["recipes"]
    common = {
        key: value
        for key, value in (rows[0]["arguments"] if rows else {}).items()
        if all(row["arguments"].get(key) == value for row in rows)
    }
    lines = [
        json.dumps({**row, "arguments": {k: v for k, v in row["arguments"].items() if k not in common}})
        for row in rows
    ]
    head = {key: value for key, value in content.items() if key != "recipes"} | {"of_all": common}
    return json.dumps(head, indent=1)[:-2] + ',\n "recipes": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


if __name__ == "__main__":
    main()
