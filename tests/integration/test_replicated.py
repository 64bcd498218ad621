"""Replicated stages of Megatron's own layers: the gradients of one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from megatron_pp_ext.integration.hooks.data_parallel import DataParallel, last_actions
from megatron_pp_ext.integration.runners.model_stage import ModelStage, StepInputs
from megatron_pp_ext.integration.runners.replicated_groups import process_groups
from megatron_pp_ext.runtime.channels import Channels, direction_groups
from megatron_pp_ext.runtime.executor import execute
from megatron_pp_ext.runtime.plan import plan_orders
from megatron_pp_ext.schedule.actions import Action, Kind
from megatron_pp_ext.schedule.families import round_robin
from megatron_pp_ext.schedule.families.round_robin import Replicas
from tests.support import rounding, training
from tests.support.ranks import run_ranks

MICROBATCHES, LENGTH, WORDS, WIDTH = 6, 8, 32, 16


def tokens(microbatch: int) -> torch.Tensor:
    return torch.randint(WORDS, (1, LENGTH), generator=torch.Generator().manual_seed(microbatch))


def model(stages: int, groups: ProcessGroupCollection) -> torch.nn.Module:
    """This rank's stage of a GPT of six layers, its weights by layer."""
    stage = groups.pp.rank()
    config = TransformerConfig(
        num_layers=6,
        hidden_size=WIDTH,
        num_attention_heads=2,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        calculate_per_token_loss=True,  # gradients are summed over replicas, and the loss is a sum
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        WORDS,
        LENGTH,
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        share_embeddings_and_output_weights=False,
        pg_collection=groups,
    )
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    chunk = DistributedDataParallel(config, settings, gpt, pg_collection=groups)
    training.initialize_by_layer([chunk])
    return chunk


def forward_step(iterator, chunk):
    """Sum the losses of one microbatch."""
    ids = next(iterator)
    positions = torch.arange(LENGTH).unsqueeze(0)
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    output = chunk(ids, positions, mask, labels=ids.roll(-1, 1))
    return output, lambda losses: (losses.sum(), torch.tensor(LENGTH), {"loss": losses.sum().detach()})


def train(rank: int, counts: tuple[int, ...]) -> dict:
    """One step; gradients by global name, reduced over the stage's replicas."""
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    base = ProcessGroupCollection.use_mpu_process_groups()
    if len(counts) == 1:
        base.pp = dist.new_group([rank])
        orders = [[Action(0, kind, j) for j in range(MICROBATCHES) for kind in (Kind.F, Kind.B)]]
        stages, rank_of = 1, lambda stage, microbatch: 0
        mine, groups = range(MICROBATCHES), base
    else:
        replicas = Replicas(counts)
        orders = round_robin.orders(replicas, MICROBATCHES)
        stages, rank_of = replicas.stages, replicas.rank_of
        groups = process_groups(replicas, base)
        replica = rank - replicas.first_rank(groups.pp.rank())
        mine = range(replica, MICROBATCHES, counts[groups.pp.rank()])
    chunk = model(stages, groups)
    stage, config = groups.pp.rank(), chunk.config
    inputs = StepInputs(
        forward_step_func=forward_step,
        model=[chunk],
        iterators=[map(tokens, mine)],
        microbatches=MICROBATCHES,
        config=config,
        cp_size=1,
        data_parallel=DataParallel([chunk], config, False, False),
        forward_only=False,
        collect_non_loss_data=False,
        first_val_step=None,
    )
    plan = plan_orders(orders, stages, rank_of, rank)
    last = last_actions(plan)[stage]
    runs = ModelStage(inputs, stage, 0, vp_stage=None, is_last=stage == stages - 1, last=last)
    everyone = list(range(dist.get_world_size()))
    shape = (LENGTH, 1, WIDTH)
    channels = Channels(everyone, *direction_groups(everyone), shape, torch.float32, torch.device("cpu"))
    chunk.zero_grad_buffer()
    execute(plan, {stage: runs}, channels)
    chunk.finish_grad_sync()
    return {
        "gradients": {name: p.main_grad.clone() for name, p in training.global_parameters([chunk])},
        "losses": sorted(loss["loss"].item() for loss in inputs.losses),
    }


@pytest.fixture(scope="module")
def alone() -> dict:
    return run_ranks(partial(train, counts=(1,)), 1)[0]


@pytest.mark.parametrize("counts", [(2, 1), (3, 1), (1, 2, 1)])
def test_gradients_are_those_of_one_process(counts: tuple[int, ...], alone: dict) -> None:
    ranks = run_ranks(partial(train, counts=counts), sum(counts))
    losses = sorted(loss for rank in ranks for loss in rank["losses"])
    assert losses == alone["losses"]
    for rank in ranks:
        for name, gradient in rank["gradients"].items():
            expected = alone["gradients"][name]
            rounding.assert_gradients_close(gradient, expected, terms=MICROBATCHES * LENGTH, name=name)
    assert {name for rank in ranks for name in rank["gradients"]} == alone["gradients"].keys()
