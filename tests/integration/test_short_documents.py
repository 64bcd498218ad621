"""Documents shorter than a sequence: every stage keeps attention within them, not the outer two alone."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import utils as core_utils
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from megatron_pp_ext.integration import releases
from megatron_pp_ext.integration.mends import stage_data
from tests.support import rounding
from tests.support.comparison import MAIN_FAMILIES, assert_same_bits, run, stock
from tests.support.ranks import run_ranks
from tests.support.tiers import first
from tests.support.training import since

END_OF_DOCUMENT = 63
DOCUMENTS = 600
PIPELINE = "--pipeline-model-parallel-size"
APART = ("--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss", "--clip-grad", "0")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The flags for documents of 4 to 20 tokens, where a sequence has 32."""
    prefix: Path = tmp_path_factory.mktemp("documents") / "short"
    random = np.random.default_rng(1)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(END_OF_DOCUMENT))
    for length in random.integers(4, 21, DOCUMENTS):
        document = [*random.integers(0, END_OF_DOCUMENT, length - 1), END_OF_DOCUMENT]
        builder.add_document(np.array(document), [length])
    builder.finalize(f"{prefix}.idx")
    return ("--data-path", str(prefix), "--split", "98,1,1")


@pytest.mark.wide
@pytest.mark.parametrize("name", MAIN_FAMILIES)
def test_a_mask_for_the_stages_of_every_chunk(name: str, flags: tuple[str, ...]) -> None:
    """Stock 1F1B is right on two ranks, both of which have an end of the model."""
    ours = run(2, [PIPELINE, "2", *flags, *APART, "--pipeline-schedule", name])
    assert_same_bits(ours, stock(2, PIPELINE, "2", *flags, *APART))


@pytest.mark.parametrize(
    "schedule", first(2, [[], ["--pipeline-schedule", "v-half"], ["--pipeline-schedule", "zb-h1"]])
)
def test_a_mask_for_the_ranks_between_the_ends(schedule: list[str], flags: tuple[str, ...]) -> None:
    """Stock's own schedule gets it too: started without this package, it is wrong from three ranks on."""
    ours = run(4, [PIPELINE, "4", *flags, *APART, *schedule])
    assert_same_bits(ours, stock(2, PIPELINE, "2", *flags, *APART))


def test_one_document_a_sequence_is_another_model(flags: tuple[str, ...]) -> None:
    """The masks of these tests mask something."""
    apart = stock(2, PIPELINE, "2", *flags, *APART)
    assert apart.losses[0] != stock(2, PIPELINE, "2", *flags, *APART[1:]).losses[0]


def test_context_parallel_ranks_get_their_part_of_the_mask(flags: tuple[str, ...]) -> None:
    """All tokens count: where some do not, Megatron takes the mean of the means of the ranks' own tokens."""
    mask = ("--reset-attention-mask", "--clip-grad", "0")
    ours = run(4, [PIPELINE, "2", "--context-parallel-size", "2", *flags, *mask])
    theirs = stock(2, PIPELINE, "2", *flags, *mask)
    assert ours.losses[0] == pytest.approx(theirs.losses[0], rel=rounding.relative())
    assert ours.losses == pytest.approx(theirs.losses, rel=rounding.of_losses(updates=1))


ROWS, LENGTH = 2, 4


def _batch_of_a_stage_between_the_ends(rank: int) -> dict[str, torch.Tensor | None]:
    """What a script's ``get_batch`` gets on one of two tensor-parallel ranks, the first of which reads."""
    dist.init_process_group("gloo", rank=rank, world_size=2)
    stage_data.get_args = lambda: SimpleNamespace(reset_attention_mask=True)
    numbers = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)
    mask = torch.arange(ROWS * LENGTH * LENGTH).remainder(3).eq(0).view(ROWS, 1, LENGTH, LENGTH)
    batch = dict.fromkeys(("tokens", "labels", "position_ids"), numbers)
    batch |= {"loss_mask": numbers.float(), "attention_mask": mask}
    flag = "has_cu_seqlens" if releases.megatron_release() >= releases.CORE_0_19 else "is_sft"
    received: dict[str, torch.Tensor | None] = core_utils.get_batch_on_this_tp_rank(
        batch if rank == 0 else {},
        **{flag: False},
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=True,
        broadcast_src_rank=0,
        broadcast_group=dist.group.WORLD,
        cp_size=1,
        tp_rank=rank,
        micro_batch_size=ROWS,
        seq_length=LENGTH,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=3,
        is_pipeline_first_stage=False,
        is_pipeline_last_stage=False,
    )
    return {name: received[name] for name in batch}


@since(releases.CORE_0_18, "before 0.18 the function reads Megatron's own arguments")
def test_all_tensor_parallel_ranks_between_the_ends_get_the_batch() -> None:
    first, second = run_ranks(_batch_of_a_stage_between_the_ends, 2)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
