"""Which schedules of files can be trained."""

from argparse import Namespace
from pathlib import Path

import pytest

from megatron_pp_ext.features.vocabulary.share import share
from megatron_pp_ext.job.pipeline import read_csv, require_batches
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.formats import csv_file

FIRST_IN_LAST_OUT = "0F0,0F1,0F2,0F3,0B0,0B3,0B2,0B1\n1F0,1F1,1F2,1F3,1B0,1B3,1B2,1B1\n"
"""Microbatch 0 comes first, as Transformer Engine needs it, and the others go back in another order."""


def asked(**others: object) -> RequestedJob:
    """The arguments of a job on two pipeline ranks, which ``others`` change."""
    plain = {
        "pipeline_model_parallel_size": 2,
        "pipeline_schedule": "csv:file.csv",
        "transformer_impl": "local",
        "fp8": None,
        "fp8_recipe": "delayed",  # as without --fp8-format
        "recompute_granularity": None,
        "micro_batch_size": 2,
        "global_batch_size": 16,
    }
    return RequestedJob.of_args(Namespace(**{**plain, **others}))


def test_a_vocabulary_that_the_ranks_share_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "shared.csv"
    csv_file.write(share(lambda count: catalog.build("v-half", 2, count), 4), file)
    with pytest.raises(ValueError, match=r"shared\.csv split the head.*with the head in the last stage"):
        read_csv(file, asked())


def test_layers_that_are_computed_again_with_delayed_scales_go_back_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "order.csv"
    file.write_text(FIRST_IN_LAST_OUT)
    delayed = {"transformer_impl": "transformer_engine", "fp8": "hybrid", "recompute_granularity": "full"}
    with pytest.raises(
        ValueError,
        match=r"stage 0 takes microbatch 3 backward where 1 is the next .*; give the backwards the",
    ):
        read_csv(file, asked(**delayed))
    for harmless in ({"fp8": None}, {"fp8_recipe": "tensorwise"}, {"recompute_granularity": None}):
        read_csv(file, asked(**(delayed | harmless)))
    with pytest.raises(ValueError, match="--fp8-recipe delayed"):
        read_csv(file, asked(**(delayed | {"recompute_granularity": None, "recompute_activations": True})))


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"global_batch_size": 16}, None),
        ({"global_batch_size": 8}, "--global-batch-size 8 requests others; set --global-batch-size 16$"),
        ({"global_batch_size": None, "step_batch_size_schedule": "0:16"}, None),
        (
            {"global_batch_size": None, "step_batch_size_schedule": "0:8, 1K:16"},
            "--step-batch-size-schedule 0:8, 1K:16 requests others; leave --step-batch-size-schedule out and "
            "set --global-batch-size 16$",
        ),
    ],
)
def test_every_step_has_the_microbatches_of_the_file(sizes: dict[str, object], problem: str | None) -> None:
    schedule = catalog.build("1f1b", 2, 4)
    if problem is None:
        require_batches(asked(**sizes), schedule, data=2)
    else:
        with pytest.raises(ValueError, match=f"has 4 microbatches in every step, but {problem}"):
            require_batches(asked(**sizes), schedule, data=2)
