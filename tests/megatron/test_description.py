"""A launch script's flags, read by Megatron's parser without a process group."""

import pytest

from megatron_pp_ext import cpu
from megatron_pp_ext.costs import system
from megatron_pp_ext.job.flag_table import spelled
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.planner.search.candidate import Candidate, Recompute
from megatron_pp_ext.planner.step.estimate import estimate_request
from megatron_pp_ext.planner.step.model_description import describe
from tests.support.flags import read_by_commands, read_by_megatron
from tests.support.training import TINY


def read(flags):
    return read_by_commands(cpu.with_cpu_flags([*TINY, *flags.split()]))


def test_a_description_and_its_flags_say_the_same():
    """What ``mpp search --model FILE`` prints as a command line, Megatron reads as the file."""
    values = {
        "num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "seq_length": 16, "vocab_size": 99,
        "group_query_attention": True, "num_query_groups": 2, "add_bias_linear": False, "swiglu": True,
        "hidden_dropout": 0.05, "fp8": "hybrid", "bf16": True, "normalization": "RMSNorm", "num_experts": 4,
    }  # fmt: skip
    candidate = Candidate(2, 1, 2, 2, 4, 1, 8, Recompute("all", "full", "uniform", 1), "flex", 2, 123456)
    args = read_by_megatron(candidate.flags(spelled(values)))
    assert Job.of(args) == candidate.described(describe(values))


def test_uneven_stages_are_cut_as_megatron_cuts_them():
    uneven = read("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*5|t*3L")
    evenly = read("--pipeline-model-parallel-size 2")
    found, even = (estimate_request(one, system.read("h100"), for_world(one, 2)) for one in (uneven, evenly))
    assert found.ranks[0].weights > even.ranks[0].weights
    assert sum(rank.weights for rank in found.ranks) == pytest.approx(
        sum(rank.weights for rank in even.ranks)
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--hidden-size 33", "--hidden-size 33 is not divisible by --num-attention-heads 4"),
        ("--group-query-attention --num-query-groups 3", "3 does not divide --num-attention-heads 4"),
        ("--num-experts 4 --moe-router-topk 5", "--moe-router-topk 5 is more than --num-experts 4: lower it"),
        ("--bf16 --fp16", "contradict each other"),
        ("--yaml-cfg x", "sizes are read from flags alone; leave it out of the estimate"),
        ("--use-torch-fsdp2", "it shards weights in a way that is not modelled"),
        (
            "--use-kitchen-attention",
            "^the planner does not support --use-kitchen-attention: this attention is not modelled; leave it "
            "out of the estimate, or measure the stages with mpp rehearse --costs FILE and give "
            "--pipeline-costs FILE$",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(flags, message):
    with pytest.raises(ValueError, match=message) as error:
        read(flags)
    assert "\n" not in str(error.value)
