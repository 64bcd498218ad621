"""Names of experts in the whole model, by which gradients of two runs are compared."""

import pytest

from megatron_pp_ext.megatron.core import parameters

LAYER = "decoder.layers.3.mlp.experts"


@pytest.mark.parametrize(("rank", "names"), [(0, "01"), (2, "45")])
def test_experts_count_through_the_ranks(rank: int, names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters.mpu, "get_expert_model_parallel_world_size", lambda: 4)
    monkeypatch.setattr(parameters.mpu, "get_expert_model_parallel_rank", lambda: rank)
    for here, everywhere in zip("01", names, strict=True):
        name = f"{LAYER}.local_experts.{here}.linear_fc1.weight"
        expected = f"{LAYER}.local_experts.{everywhere}.linear_fc1.weight"
        assert parameters._global_expert(name, 8) == expected
    for name in (f"{LAYER}.router.weight", f"{LAYER}.shared_experts.linear_fc1.weight"):
        assert parameters._global_expert(name, 8) == name
