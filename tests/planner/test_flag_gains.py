"""What a search reports of the flags that it does not try."""

from dataclasses import replace

import pytest

from megatron_pp_ext.costs import system
from megatron_pp_ext.job.flag_table import parse
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.job.requested_job import RequestedJob
from megatron_pp_ext.planner.search.best_first import Search
from megatron_pp_ext.planner.search.configurations import Space
from megatron_pp_ext.planner.search.flag_gains import SETTINGS, FlagGains, Trials
from megatron_pp_ext.planner.step.estimate import estimate_request
from megatron_pp_ext.planner.step.model_description import derive_arguments

H100, GPUS, LIMIT = system.read("h100"), 8, 60e9
DENSE = (
    "--num-layers 16 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --vocab-size 128000 "
    "--max-position-embeddings 4096 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --context-parallel-size 1 --bf16 "
    "--micro-batch-size 1 --global-batch-size 16"
)
EXPERTS = (
    f"{DENSE.replace('--tensor-model-parallel-size 2', '--tensor-model-parallel-size 1')} --num-experts 16 "
    "--moe-ffn-hidden-size 1024 --moe-token-dispatcher-type alltoall --moe-grouped-gemm "
    "--expert-model-parallel-size 2"
)
FIXED = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size", "context_parallel_size",
    "expert_model_parallel_size",
)  # fmt: skip


def gains(flags, schedules=("1f1b", "dualpipe-v"), **trials) -> tuple[RequestedJob, FlagGains]:
    args, _ = parse(flags.split(), {})
    derive_arguments(args)
    job = RequestedJob.of_args(args)
    space = Space(job, GPUS, 8, 16, schedules, FIXED, is_uneven=True)
    found = Search(space, H100, LIMIT, top=3).run()
    return job, Trials(space, job, H100, LIMIT, 0.05, **trials).gains(found)


def by_flags(found: FlagGains):
    return {gain.setting.words: gain.outcome for gain in found.gains}


def test_a_gain_is_the_estimate_with_the_flag():
    """The reported step and bytes are those of ``mpp estimate`` for the printed command."""
    job, found = gains(DENSE)
    overlap = by_flags(found)["--tp-comm-overlap"]
    assert overlap.seconds < found.best.seconds
    with_flag = overlap.candidate.applied_to(job.with_arguments(tp_comm_overlap=True))
    alone = estimate_request(with_flag, H100, for_world(with_flag, GPUS))
    assert (overlap.seconds, overlap.bytes) == pytest.approx((alone.step_seconds, alone.fullest.total))
    bf16 = by_flags(found)["--grad-reduce-in-bf16"]
    assert bf16.bytes < found.best.bytes
    # Together they are no slower than any of them, and are among what was found.
    assert {"--tp-comm-overlap", "--pipeline-vocabulary shared"} <= {s.words for s in found.chosen}
    assert found.shortest.seconds <= min(overlap.seconds, bf16.seconds)
    assert f"({found.shortest.seconds / found.best.seconds - 1:+.1%})" in found.lines[-1]
    words = found.flags(["--bf16", "--pipeline-vocabulary", "auto"])
    assert "--tp-comm-overlap" in words and words.count("--pipeline-vocabulary") == 1
    assert words[words.index("--pipeline-vocabulary") + 1] == "shared"


def test_what_megatron_refuses_is_reported_and_not_chosen():
    def refusal(candidate, values):
        return "Megatron refuses it: x is y" if "tp_comm_overlap" in values else ""

    _, found = gains(DENSE, refusal=refusal)
    assert "--tp-comm-overlap: Megatron refuses it: x is y" in found.lines
    assert "--tp-comm-overlap" not in {setting.words for setting in found.chosen}
    # Where all of it is refused together, nothing is recommended.
    _, none = gains(DENSE, refusal=lambda candidate, values: "no" if len(values) > 1 else "")
    assert none.shortest is None and len(none.chosen) > 1


def test_experts_are_estimated_in_pairs_and_by_other_dispatchers():
    _, found = gains(EXPERTS)
    outcomes = by_flags(found)
    pairs = outcomes["--overlap-moe-expert-parallel-comm"]
    assert any(type(option).__name__ == "Pairs" for option in pairs.candidate.options)
    assert any("deepep" in words for words in outcomes) and any("hybridep" in words for words in outcomes)
    assert "--tp-comm-overlap" not in outcomes
    assert "--moe-token-dispatcher-type alltoall" not in outcomes


@pytest.mark.parametrize("machine", ["mi300x", "gb200"])
def test_dispatchers_are_those_that_a_system_has(machine):
    _, found = gains(EXPERTS)
    made = system.read(machine)
    job = RequestedJob.of_args(parse(EXPERTS.split(), {})[0])
    words = {setting.words for setting in SETTINGS if setting.suits(job, found.best.candidate, made)}
    assert not any("deepep" in flags for flags in words)
    assert any("hybridep" in flags for flags in words) == (machine == "gb200")


def test_slices_are_estimated_for_long_sequences():
    _, found = gains(
        DENSE.replace("4096 --vocab", "16384 --vocab").replace("embeddings 4096", "embeddings 16384")
    )
    sliced = by_flags(found)["--pipeline-slice-tokens auto"]
    assert sliced.candidate.planned.tokens in (8192, 4096)
    assert "--pipeline-slice-tokens auto" not in by_flags(gains(DENSE)[1])


def test_flags_that_are_given_are_not_named_again():
    given = "--tp-comm-overlap --grad-reduce-in-bf16 --cross-entropy-loss-fusion"
    _, found = gains(f"{DENSE} {given}")
    assert not {"--tp-comm-overlap", "--grad-reduce-in-bf16", "--cross-entropy-loss-fusion"} & set(
        by_flags(found)
    )


def test_no_flag_is_estimated_once_the_time_is_spent():
    job, _ = gains(DENSE)
    space = Space(job, GPUS, 8, 16, ("1f1b",), FIXED)
    result = Search(space, H100, LIMIT, top=1).run()
    late = Trials(space, job, H100, LIMIT, 0.05)
    late._start -= 1000
    spent = late.gains(result)
    assert spent.gains == () and spent.shortest is None
    assert spent.lines == [f"not estimated: {', '.join(setting.words for setting in spent.remaining)}"]
    measured = replace(space, stages=4)
    assert Trials(measured, job, H100, LIMIT, 0.05).gains(result).lines == []
