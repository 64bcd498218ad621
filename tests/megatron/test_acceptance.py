"""The installed Megatron's own verdict on the command line of a job, which commands ask for."""

import shlex
import shutil
from pathlib import Path

import pytest

from megatron_pp_ext.job import ask_megatron
from megatron_pp_ext.job.ask_megatron import Megatron, Verdict, question
from megatron_pp_ext.job.flag_table import UnknownFlag
from megatron_pp_ext.job.pipeline import for_world
from megatron_pp_ext.planner import described
from megatron_pp_ext.planner.search.launch_lines import environment

ANY = (
    "--hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --mock-data --train-iters 10 --lr 1e-4 --tokenizer-type NullTokenizer "
    "--vocab-size 1000 --untie-embeddings-and-output-weights --num-layers 8 --bf16 --global-batch-size 16 "
    "--position-embedding-type rope --disable-bias-linear --pipeline-model-parallel-size 2"
)
DENSE = f"{ANY} --tensor-model-parallel-size 2 --sequence-parallel --swiglu"
EXPERTS = (
    f"{ANY} --num-experts 8 --moe-ffn-hidden-size 512 --expert-model-parallel-size 4 "
    "--moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm"
)
DELTA_NETS = "--experimental-attention-variant gated_delta_net --linear-attention-freq 4"


def asked(flags: str) -> ask_megatron.Question:
    """Return the question about a job of ``flags`` on 8 GPUs."""
    words = shlex.split(flags)
    job = described.read(words, None).counted()
    return question(words, job, for_world(job, 8), 8, environment(words))


def verdict(flags: str) -> Verdict:
    with Megatron() as megatron:
        return megatron.ask(asked(flags))


pytestmark = pytest.mark.usefixtures("own_cache", "shared_megatron")


@pytest.mark.parametrize(
    "flags",
    [
        DENSE,
        f"{DENSE} --pipeline-schedule v-half",
        f"{DENSE} --pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 4",
        f"{DENSE} --pipeline-schedule zb-h1 --pipeline-vocabulary shared",
        f"{DENSE} --pipeline-schedule 1f1b --pipeline-model-parallel-layout Et*3|t*5L",
        f"{DENSE} --cp-comm-type a2a+p2p --context-parallel-size 2 --hierarchical-context-parallel-sizes 2 1",
        f"{DENSE} --transformer-impl transformer_engine {DELTA_NETS} --linear-num-value-heads 48",
        f"{EXPERTS} --pipeline-schedule 1f1b",
        f"{EXPERTS} --pipeline-schedule dualpipe-v --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ],
)
def test_a_job_that_starts_is_accepted(flags: str) -> None:
    found = verdict(flags).require_accepted()
    assert not found.unasked and found.line == f"Megatron {ask_megatron.release()} accepts these flags"
    assert not found.differs.keys() - {"inprocess_active_world_size"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--cp-comm-type a2a+p2p", "--hierarchical-context-parallel-sizes must be set"),
        ("--cp-comm-type p2p a2a+p2p", "--hierarchical-context-parallel-sizes must be set"),
        (f"{DELTA_NETS} --linear-num-value-heads 24", r"linear_num_value_heads \(24\) must be a multiple of"),
        ("--recompute-granularity selective --recompute-modules core_atn", "core_atn"),
        ("--use-distributed-optimizer --overlap-param-gather", "--overlap-grad-reduce"),
        ("--num-experts 8 --moe-router-num-groups 3 --moe-router-group-topk 1", "divisible by"),
        ("--multi-latent-attention --group-query-attention --num-query-groups 8", "mutually exclusive"),
        ("--exp-avg-dtype bf16", "exp_avg_dtype"),
        ("--use-precision-aware-optimizer", "only supported with distributed optimizer"),
        ("--pipeline-schedule v-half --fp8-param-gather --use-distributed-optimizer", "fp8"),
    ],
)
def test_what_megatron_refuses_is_refused_in_its_words(flags: str, words: str) -> None:
    with pytest.raises(ValueError, match=rf"^Megatron [\d.]+ refuses these flags: .*{words}") as error:
        verdict(f"{DENSE} {flags}").require_accepted()
    assert "\n" not in str(error.value)


def test_pairs_of_one_chunk_a_rank_are_refused_under_megatrons_own_schedule() -> None:
    assert "virtual_pipeline_model_parallel_size" in verdict(EXPERTS).refusal


def test_what_this_machine_lacks_is_no_refusal() -> None:
    found = verdict(f"{DENSE} --non-persistent-ckpt-type local")
    assert not found.refusal and "nvidia_resiliency_ext" in found.unasked
    assert found.require_accepted().line.startswith("not held against Megatron's own checks: ")


def test_an_answer_is_stored_by_job_and_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    first = verdict(DENSE)
    with monkeypatch.context() as patch:
        patch.setattr(ask_megatron, "_start", lambda: pytest.fail("asked again"))
        assert verdict(DENSE) == first
        patch.setattr(ask_megatron, "_files", lambda: [["another", 0, 0]])
        with pytest.raises(pytest.fail.Exception, match="asked again"):
            verdict(DENSE)
    stored = ask_megatron._place(asked(DENSE))
    stored.write_text("{}")
    assert verdict(DENSE) == first and stored.read_text() != "{}"


def test_without_megatron_training_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ask_megatron._folder
    monkeypatch.setattr(ask_megatron, "_folder", lambda name: None if name == "training" else folder(name))
    monkeypatch.setattr(ask_megatron, "_start", lambda: pytest.fail("asked"))
    found = verdict(f"{DENSE} --cp-comm-type a2a+p2p").require_accepted()
    assert found.line == "not held against Megatron's own checks: megatron.training is not installed"


def test_a_megatron_that_cannot_be_imported_keeps_the_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    (tmp_path / "torch.py").write_text("raise SystemExit(1)\n")
    monkeypatch.setenv("MEGATRON_PP_EXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    found = verdict(DENSE).require_accepted()
    assert "could not be imported" in found.line and not [*tmp_path.glob("cache/**/*.json")]


@pytest.fixture
def fork(shared_megatron: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Megatron whose trainer has two more flags; its core is the installed one."""
    monkeypatch.undo()
    monkeypatch.setenv("MEGATRON_PP_EXT_CACHE", str(tmp_path / "cache"))
    trainer = ask_megatron._folder("training")
    assert trainer is not None
    shutil.copytree(trainer, tmp_path / "megatron" / "training", ignore=shutil.ignore_patterns("*.pyc"))
    arguments = tmp_path / "megatron" / "training" / "arguments.py"
    more = """

stock_flags = add_megatron_arguments


def add_megatron_arguments(parser):
    parser = stock_flags(parser)
    parser.add_argument("--fork-rate", type=float)
    parser.add_argument("--fork-files", nargs="+")
    parser.set_defaults(hidden_dropout=0.5)
    return parser
"""
    arguments.write_text(arguments.read_text() + more)
    monkeypatch.syspath_prepend(tmp_path)
    folder = ask_megatron._folder
    where = {"training": arguments.parent}
    monkeypatch.setattr(ask_megatron, "_folder", lambda name: where.get(name) or folder(name))


@pytest.mark.wide
@pytest.mark.usefixtures("fork")
def test_flags_of_a_fork_are_permitted_and_reported() -> None:
    with pytest.MonkeyPatch.context() as patch, Megatron() as megatron:
        megatron.prepare()
        patch.setattr(ask_megatron, "_start", lambda: megatron._process)
        patch.setattr(ask_megatron, "_end", lambda process: None)
        flags = f"{DENSE} --fork-files a b --fork-rate 0.5 --log-throughput"
        found = described.read(shlex.split(flags), None)
        (note,) = found.notes
        assert "has --fork-files, --fork-rate, of which nothing is known here" in note
        assert found.counted().model.num_layers == 8
        accepted = megatron.ask(asked(flags)).require_accepted()
        assert not accepted.unasked and accepted.differs["hidden_dropout"] == 0.5
        for wrong in ("--fork-rates 0.5", "--fork-rate 0.5 --num-layer 9"):
            with pytest.raises(UnknownFlag, match="is none of Megatron's: ") as error:
                described.read(shlex.split(f"{DENSE} {wrong}"), None)
            assert wrong.split()[-2] in str(error.value)


def test_an_unknown_flag_is_refused_where_nobody_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask_megatron, "_folder", lambda name: None)
    with pytest.raises(UnknownFlag, match="--fork-rate is none of Megatron's"):
        described.read(shlex.split(f"{DENSE} --fork-rate 0.5"), None)
