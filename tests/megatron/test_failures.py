"""A rank that is killed in the middle of a step: the others end, and the last checkpoint loads."""

import os
import signal
from pathlib import Path

import pytest
import torch

from megatron_pp_ext.megatron.runners.model_stage import ModelStage
from tests.support.ranks import RankError
from tests.support.training import initialize_by_layer, train

pytestmark = pytest.mark.wide

FLAGS = ("--pipeline-model-parallel-size", "4", "--ckpt-format", "torch_dist", "--train-iters", "4")
SCHEDULE = ("--pipeline-schedule", "v-half")


def kill_rank_2_in_step_3(chunks: list[torch.nn.Module]) -> None:
    initialize_by_layer(chunks)
    if os.environ["RANK"] != "2":
        return
    seen = []
    backward_weight = ModelStage.backward_weight

    def killed(self: ModelStage, microbatch: int) -> None:
        seen.append(microbatch)
        # Eight microbatches and two chunks are 16 W a step: this one is in the middle of the third.
        if len(seen) == 38:
            os.kill(os.getpid(), signal.SIGKILL)
        backward_weight(self, microbatch)

    ModelStage.backward_weight = killed  # type: ignore[method-assign]


def test_the_others_end_and_the_checkpoint_loads(tmp_path: Path) -> None:
    save = ("--save", str(tmp_path), "--save-interval", "1")
    with pytest.raises(RankError, match="rank 2 failed") as error:
        train(4, [*FLAGS, *SCHEDULE, *save], initialize=kill_rank_2_in_step_3)
    # Its neighbours found their connection closed and ended by themselves, with a traceback to tell.
    for neighbour in (1, 3):
        assert f"--- rank {neighbour} ---" in str(error.value)
    assert "Connection" in str(error.value)
    whole = train(4, [*FLAGS, *SCHEDULE])[-1]
    for schedule in (SCHEDULE, ()):
        resumed = train(4, [*FLAGS, *schedule, "--load", str(tmp_path)])[-1]
        assert resumed.losses == whole.losses[2:]
