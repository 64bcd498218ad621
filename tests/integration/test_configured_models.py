"""Stock Megatron validates and configures every model that has a name or a config.json in the tests."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from megatron_pp_ext.job.flag_table import spelled
from megatron_pp_ext.jobs.command import missing
from megatron_pp_ext.planner import described
from megatron_pp_ext.planner.hugging_face import config_json
from megatron_pp_ext.planner.hugging_face.config_json import GivenModel
from tests.support import model_configs
from tests.support.flags import configured


def models() -> dict[str, GivenModel]:
    """The named models, and those of ``tests.support.model_configs``."""
    files = {name: value for name, value in vars(model_configs).items() if name.isupper()}
    found = {name: described.named(name).described for name in described.names()}
    return found | {name: config_json.read(value) for name, value in files.items()}


MODELS = models()


@cache
def configs() -> dict[str, dict[str, Any]]:
    """What Megatron configures each of ``MODELS`` with, in one process."""
    lines = [[*spelled(model.values), "--micro-batch-size", "1"] for model in MODELS.values()]
    return dict(zip(MODELS, configured([[*line, *missing(line)] for line in lines]), strict=True))


OTHERWISE_SAID = {"num_query_groups", "window_size", "no_rope_freq", "moe_router_load_balancing_type"}


@pytest.mark.parametrize("name", MODELS)
def test_megatron_configures_the_model_that_was_described(name: str) -> None:
    config, values = configs()[name], MODELS[name].values
    assert config["num_layers"] == layers(values)
    for field, value in values.items():
        if value is not None and field in config and field not in OTHERWISE_SAID:
            assert config[field] == value, field
    assert config["num_moe_experts"] == values.get("num_experts")
    assert config["gated_linear_unit"] == ("swiglu" in values or "quick_geglu" in values)
    assert config["num_query_groups"] == (values.get("num_query_groups") or values["num_attention_heads"])
    every = values.get("no_rope_freq")
    assert config["no_rope_freq"] == (
        every and [int(number % every == 0) for number in range(1, layers(values) + 1)]
    )
    window = values.get("window_size")
    assert config["window_size"] == (window and tuple(map(int, window.split(","))))


def layers(values: Mapping[str, Any]) -> int:
    """The layers of a model, without those that predict further tokens."""
    return values.get("num_layers") or len(values["hybrid_layer_pattern"].partition("/")[0])
