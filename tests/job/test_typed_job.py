"""A job has a field for every argument that the costs count, and says once what follows from them."""

from argparse import Namespace
from enum import Enum

import pytest

from megatron_pp_ext.job import flag_effects, flag_table
from megatron_pp_ext.job.typed_job import IMPLY, OTHER_NAMES, PLACES, Job

OF_OTHER_FRAMEWORKS = {"async_tensor_model_parallel_allreduce", "action_starts", "casts_experts_slowly"}
"""What no release of Megatron has a flag for: see ``job.parts.Parallel``, ``job.typed_job.Precision``."""


OF_OLDER_RELEASES = {"scatter_gather_tensors_in_pipeline"}
"""What a command's flags no longer say, and training on an older Megatron still reads."""


def test_every_counted_argument_has_a_field_and_every_field_is_counted() -> None:
    fields = set(PLACES) - OF_OTHER_FRAMEWORKS - OF_OLDER_RELEASES - set(flag_table.names())
    assert fields | set(OTHER_NAMES) | IMPLY == flag_effects.counted()
    assert not fields & (set(OTHER_NAMES) | IMPLY)


def test_what_nobody_gives_has_megatrons_default() -> None:
    """None of Megatron is an empty value here where a field has no None."""
    assert Job.of(flag_table.parse([], {})[0]) == Job()
    assert Job.of(Namespace()) == Job()


def test_a_job_is_filled_from_whatever_has_the_names() -> None:
    class Backend(Enum):
        unfused = 2

    asked = Namespace(
        num_layers=None,
        encoder_num_layers=6,
        attention_backend=Backend.unfused,
        recompute_activations=True,
        recompute_modules=["mlp"],
        tensor_model_parallel_size=1,
        sequence_parallel=True,
        use_rotary_position_embeddings=True,
        pipeline_schedule="ZB-H1",
        micro_batch_size=3,
        unknown="left alone",
    )
    job = Job.of(asked)
    assert (job.model.num_layers, job.batch.micro_batch_size) == (6, 3)
    assert job.precision.is_unfused
    assert job.memory.recomputed == {"mlp"}
    assert not job.parallel.sequence_parallel
    assert job.model.position_embedding_type == "rope"
    assert job.pipeline.pipeline_schedule == "zb-h1"
    assert Job.of(job) == job


def test_a_change_shares_the_parts_that_it_leaves_alone() -> None:
    job = Job()
    other = job.changed(hidden_size=8, num_layers=2, micro_batch_size=4)
    assert (other.model.hidden_size, other.model.num_layers, other.batch.micro_batch_size) == (8, 2, 4)
    assert (job.model.hidden_size, job.batch.micro_batch_size) == (0, 0)
    assert other.parallel is job.parallel and other.memory is job.memory
    assert other.changed(hidden_size=None, num_layers=None, micro_batch_size=None) == job
    with pytest.raises(KeyError, match="hidden_sizes"):
        job.changed(hidden_sizes=8)
    with pytest.raises(AttributeError):
        job.model.hidden_size = 8  # type: ignore[misc]


def test_layers_that_have_experts() -> None:
    dense = Job().changed(num_layers=4)
    assert dense.model.has_experts == (False,) * 4
    assert dense.changed(num_experts=2).model.has_experts == (True,) * 4
    assert dense.changed(num_experts=2, moe_layer_freq=3).model.has_experts == (True, False, False, True)
    given = dense.changed(num_experts=2, moe_layer_freq=(0, 1, 1, 0))
    assert given.model.has_experts == (False, True, True, False)
