"""Every rule about what cannot be asked together refuses the flags that ask for it, in one line.

A case is an excerpt of the rule's text and the flags that break it.  They are read as a job reads them.
"""

import string
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_pp_ext.job import flag_effects, flag_table
from megatron_pp_ext.job.requested_job import ENGINE, Flags, RequestedJob
from megatron_pp_ext.job.rules import all_rules, schedules, stock
from megatron_pp_ext.job.rules.all_rules import refuse, refuse_config
from megatron_pp_ext.job.rules.rule import Refused, Rule, Rules
from megatron_pp_ext.megatron.trainer import validation
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.formats import csv_file
from megatron_pp_ext.schedule.placement import Placement, Shape
from tests.support.flags import PP4, arguments, read, requested_by
from tests.support.training import has_flag

UNTIED = "--untie-embeddings-and-output-weights"
ONE = f"{PP4} {UNTIED} --global-batch-size 1 --pipeline-schedule pipedream"
PP2 = "--pipeline-model-parallel-size 2"
LAYOUT = "--pipeline-model-parallel-layout"
EXPERTS = "--num-experts 4 --disable-bias-linear --moe-token-dispatcher-type alltoall"
PAIRS = f"{PP2} --expert-model-parallel-size 2 {EXPERTS} --bf16 --overlap-moe-expert-parallel-comm"
REPLICAS = f"{PP2} {UNTIED} --global-batch-size 3 --pipeline-schedule pipedream --pipeline-replicas 3-1"
SHARED = "--pipeline-vocabulary shared"
SPARSE = (
    "--experimental-attention-variant dsa --multi-latent-attention --dsa-indexer-n-heads 2 "
    "--dsa-indexer-head-dim 16 --dsa-indexer-topk 8"
)
SLICES = "--pipeline-slice-tokens 8"

DEFER, EARLY = "--defer-embedding-wgrad-compute", "--overlap-param-gather-with-optimizer-step"

GRAPHS, PER_LAYER = "--cuda-graph-impl full_iteration", "--cuda-graph-impl transformer_engine"
OLDER = "before Megatron 0.18 the next microbatch overwrites"
LOCAL, WHOLE = "--cuda-graph-impl local", "--pipeline-schedule 1f1b-v"

CASES: dict[str, dict[str, str]] = {
    f"With CUDA graphs|{PP4} {UNTIED} --pipeline-unproved {GRAPHS} --pipeline-schedule v-half": {
        "without a flush no step is like": "--pipeline-schedule pipedream",
        "a schedule that changes: a graph holds": "--pipeline-profile-steps 1-2",
        "--rampup-batch-size: a graph": "--rampup-batch-size 4 4 100",
        "--step-batch-size-schedule: a graph": "--step-batch-size-schedule 0:8",
        "--cuda-graph-warmup-steps 0: the first step": "--cuda-graph-warmup-steps 0",
        "--pipeline-offload: the host waits": "--pipeline-offload 0.5",
        "would take the graph of another": f"{PER_LAYER} --recompute-granularity full",
        "actions within a graph have no times": "--pipeline-trace x.json",
        "a V moves the losses of predictions": "--mtp-num-layers 1",
    },
    f"With Megatron's own CUDA graphs (`local`)|{PP4} {UNTIED} --pipeline-unproved {LOCAL} {WHOLE}": {
        "between the forwards of a chunk's layers": f"--overlap-moe-expert-parallel-comm {EXPERTS} --bf16",
        "--pipeline-vocabulary: embeddings keep gradients": SHARED,
        "--fine-grained-activation-offloading: its copies": "--fine-grained-activation-offloading",
        "it is an older name of graphs of a whole iteration": "--cuda-graph-scope full_iteration",
        OLDER: "",
    },
    f"Under every schedule of this package|{PP4} --pipeline-schedule v-half": {
        "--use-megatron-fsdp: FSDP reduces": "--use-megatron-fsdp",
        "--use-torch-fsdp2: FSDP reduces": "--use-torch-fsdp2",
        "without --overlap-moe-expert-parallel-comm: schedules split": "--delay-wgrad-compute",
        "were never run on a GPU; try scripts/gpu_check.sh graphs": "--cuda-graph-impl transformer_engine",
        "--enable-cuda-graph: it is an older name; use --cuda-graph-impl local": "--enable-cuda-graph",
        "--external-cuda-graph: it is an older name": "--external-cuda-graph",
        "--hybrid-context-parallel: its microbatches differ": "--hybrid-context-parallel",
        "or choose breadth-first, whose": "--microbatch-group-size-per-virtual-pipeline-stage 4",
        "in the warm-up and the flush too": "--overlap-p2p-communication-warmup-flush",
        "messages always overlap computing": "--no-overlap-p2p-communication",
        "--use-ring-exchange-p2p: each message": "--use-ring-exchange-p2p",
        "groups of --distributed-backend": "--pipeline-model-parallel-comm-backend ucc",
        "of the microbatch whose forward was last; add --recompute-granularity selective": (
            "--fine-grained-activation-offloading --recompute-granularity full --recompute-method uniform"
        ),
        "--cpu-offloading-num-layers: Megatron has it": "--cpu-offloading-num-layers 1",
        "--moe-paged-stash: it holds all steps": "--moe-paged-stash --pipeline-profile-steps 1-2",
        "fails at the first evaluation; leave it out and set --eval-iters, or": "--full-validation",
        "several sets as a whole alone; leave it": "--multiple-validation-sets",
        "put the m into stage ": f"{LAYOUT} Et|t|ttttttm|||||L --mtp-num-layers 1",
    },
    "Where zstandard is missing|--pipeline-model-parallel-size 1": {
        "writes by zstandard": "--logits-save-dir a",
        "reads by zstandard": "--logits-load-dir a",
    },
    f"Where the backward is split|{PP4} --pipeline-schedule zb-h1": {
        "install transformer-engine 2.3 or newer": "--transformer-impl transformer_engine",
        "--tp-comm-overlap: with --fp8-recipe mxfp8": (
            "--tp-comm-overlap --fp8-format e4m3 --fp8-recipe mxfp8 --bf16"
        ),
        "its backwards are single graphs": "--cuda-graph-impl local --pipeline-unproved",
        "-with-experts-wgrad: schedules defer": "--overlap-dispatch-backward-with-experts-wgrad",
        "--tensor-parallel-num-weight-shards: a weight": "--tensor-parallel-num-weight-shards 2",
        "--expert-tensor-parallel-num-weight-shards: ": "--expert-tensor-parallel-num-weight-shards 2",
    },
    f"Under a V|{PP4} --pipeline-schedule v-half": {
        "--decoder-first-pipeline-num-layers: a V has both ends": "--decoder-first-pipeline-num-layers 2",
        "--decoder-last-pipeline-num-layers: a V has both ends": "--decoder-last-pipeline-num-layers 2",
    },
    f"With stages between the ends|{PP4} --pipeline-schedule 1f1b": {
        "Megatron cannot count the samples": "--full-validation --multiple-validation-sets"
    },
    "Without a pipeline|": {
        "--pipeline-vocabulary {": "--pipeline-vocabulary auto",
        "-layout auto needs a pipeline": f"{LAYOUT} auto",
        "--pipeline-schedule {": "--pipeline-schedule v-half",
        "--pipeline-trace needs a pipeline of 2 ranks or more, got": "--pipeline-trace x.json",
    },
    f"With a flush|{PP4} --pipeline-schedule 1f1b": {
        "--pipeline-update-interval has no": "--pipeline-update-interval 2",
        "--pipeline-vertical-sync has no": "--pipeline-vertical-sync",
        "--pipeline-allow-waits has no": "--pipeline-allow-waits",
    },
    f"Flags of one schedule with another|{PP4}": {
        "--pipeline-replicas {": "--pipeline-replicas 1-1-1-1",
        "--pipeline-memory-limit {": "--pipeline-schedule 1f1b --pipeline-memory-limit 0.5",
        "--pipeline-costs {": "--pipeline-schedule pipedream --pipeline-costs x.json",
        "--pipeline-loss-rank {": "--pipeline-loss-rank last",
        "--pipeline-loss-rank first": "--pipeline-schedule 1f1b --pipeline-loss-rank first",
        "needs --pipeline-memory-limit; give a fraction": "--pipeline-schedule flex",
        "dynamic loss scale of --fp16 skips": "--pipeline-schedule auto --fp16",
    },
    f"With `--pipeline-offload`|{PP4} --pipeline-offload auto": {
        "without a flush no step has": f"{UNTIED} --pipeline-schedule pipedream",
        "both would move the same": "--pipeline-schedule 1f1b --fine-grained-activation-offloading",
        "its measurements know nothing": "--pipeline-schedule 1f1b --pipeline-profile-steps 1-2",
        "the compiler does not choose copies": f"--pipeline-schedule auto {SHARED}",
    },
    f"Without `--pipeline-offload`|{PP4} --pipeline-schedule 1f1b": {
        "is for activations that wait on the host": "--pipeline-offload-host-bytes 1e9"
    },
    f"What `--pipeline-order` needs|{PP4} --pipeline-order given": {
        "no effect under Megatron's own schedules; add --pipeline-schedule, 1f1b": ""
    },
    f"With `--pipeline-order rule` or `search`|{PP4} --pipeline-order rule": {
        "update their weights between microbatches": f"{UNTIED} --pipeline-schedule pipedream",
        "a graph holds one length": f"--pipeline-schedule v-half --pipeline-unproved {GRAPHS}",
        "replayed in the order of its record": "--pipeline-schedule v-half --moe-enable-routing-replay "
        f"{EXPERTS}",
    },
    f"With `--pipeline-order rule` or `search` under `flex` and `auto`|{PP4} --pipeline-order rule "
    "--pipeline-schedule flex --pipeline-memory-limit 0.5": {
        "plan by each other's lengths": f"--expert-model-parallel-size 2 {EXPERTS}",
        "does not place the parts of a vocabulary": SHARED,
        "copies are planned for one order": "--pipeline-offload auto",
        "offload is made for one order": "--fine-grained-activation-offloading",
    },
    f"With `--pipeline-order rule` or `search`|{PP2} --fake-process-group --pipeline-order rule": {
        "--rehearse-pipeline: a rehearsal runs": "--pipeline-schedule 1f1b --rehearse-pipeline x.json"
    },
    f"What `--pipeline-slice-tokens` needs|{PP4} {SLICES}": {
        "no effect under Megatron's own schedules; add --pipeline-schedule, v-half": "",
        "cannot be shared out over --tensor": "--pipeline-schedule v-half --tensor-model-parallel-size 4 "
        "--sequence-parallel --pipeline-slice-tokens 6",
        "cannot be shared out over --context": "--pipeline-schedule v-half --tensor-model-parallel-size 2 "
        "--sequence-parallel --pipeline-slice-tokens 6 --context-parallel-size 2",
    },
    f"Without `--pipeline-slice-tokens`|{PP4} --pipeline-schedule 1f1b": {
        "--pipeline-slice-check is about slices": "--pipeline-slice-check off"
    },
    f"With `--pipeline-slice-tokens`|{PP4} {SLICES}": {
        "would do so within a sequence": f"{UNTIED} --pipeline-schedule pipedream",
        "the file orders microbatches": "--pipeline-schedule csv:x.csv",
    },
    f"With `--pipeline-slice-tokens`|{PP4} {SLICES} --pipeline-schedule v-half": {
        "--moe-enable-routing-replay: routing is rec": "--moe-enable-routing-replay",
        "would see later ones": "--window-size 4,2",
        "its kernels know no keys": f"{SPARSE} --spec my.layers stack --dsa-kernel-backend cudnn",
        "layers look for the choice": f"{SPARSE} --spec my.layers stack --dsa-indexer-topk-freq 2",
        "takes as many keys as queries": f"{SPARSE} --spec my.layers stack --tensor-model-parallel-size 2 "
        "--sequence-parallel",
        "Mamba-2's fused kernel, which it": "--hybrid-layer-pattern M*|M*|M*|M*|M*|M*|M*|M* "
        "--spec my.layers stack --disable-mamba-mem-eff-path",
        "another number of keys in each": "--cuda-graph-impl transformer_engine --pipeline-unproved",
        "--tp-comm-overlap: its buffers": "--tp-comm-overlap",
        "--fine-grained-activation-offloading: it counts": "--fine-grained-activation-offloading",
        "--pipeline-offload: slices share": "--pipeline-offload auto",
        "--pipeline-vocabulary: its exchanges are of": SHARED,
        "--pipeline-profile-steps: what it compiles": "--pipeline-profile-steps 1-2",
    },
    f"With `--pipeline-slice-tokens` and context parallelism|{PP4} {SLICES} --pipeline-schedule v-half "
    "--context-parallel-size 2": {
        "exchange tokens for whole heads": "--tensor-model-parallel-size 4",
        "exchange heads in one level": "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 1",
        "the numbers for all would be": "--softmax-type learnable",
        "--qk-clip: the maximum of": "--qk-clip",
        "takes the order of whole": "--hybrid-layer-pattern M*|M*|M*|M*|M*|M*|M*|M* --spec my.layers stack",
        "its indexer chooses for all heads": f"{SPARSE} --spec my.layers stack",
        "divided by halves": "--position-embedding-type mrope",
    },
    f"With `--pipeline-slice-tokens`|{PP2} --fake-process-group {SLICES}": {
        "--rehearse-pipeline: a rehearsal": "--pipeline-schedule 1f1b --rehearse-pipeline x.json"
    },
    f"With `--pipeline-slice-tokens`|{PAIRS} {SLICES}": {
        "-expert-parallel-comm: Megatron plans layers of": "--pipeline-schedule 1f1b"
    },
    f"Bytes of the host|{PP4} --pipeline-schedule 1f1b --pipeline-offload 0.5": {
        "-host-bytes {pipeline_offload_host_bytes} must be": "--pipeline-offload-host-bytes 0"
    },
    f"With a shared vocabulary, also under `auto`|{PP4} --pipeline-vocabulary auto": {
        "no effect under Megatron's own schedules; add": "--pipeline-trace x.json",
        "every stage updates its weights by itself": f"{UNTIED} --pipeline-schedule pipedream",
        "the file has no place for the parts": "--pipeline-schedule csv:x.csv",
    },
    f"With a shared vocabulary; `auto` does not share it then|{PP4} {SHARED} --pipeline-schedule 1f1b": {
        "--mtp-num-layers: multi-token prediction has logits": "--mtp-num-layers 1",
        "--init-model-with-meta-device: the rows": "--init-model-with-meta-device",
        "rows of the vocabulary would be cut twice": "--tensor-parallel-num-weight-shards 2",
        "--pipeline-profile-steps: its measurements": "--pipeline-profile-steps 1-2",
    },
    f"With `--overlap-moe-expert-parallel-comm`|{PAIRS} --pipeline-schedule 1f1b": {
        "its order has no pairs; choose ": "--pipeline-schedule v-half",
        "--expert-model-parallel-size 1: tokens then": "--expert-model-parallel-size 1",
        "allgather: it gathers": "--moe-token-dispatcher-type allgather",
        "--distribute-saved-activations: the layers of a plan": "--recompute-granularity full "
        "--distribute-saved-activations",
        "would count twice for its scales": "--recompute-granularity full --fp8-format hybrid",
        "moe: its tokens": "--recompute-granularity selective --recompute-modules moe",
        "--moe-shared-expert-overlap: a plan": "--moe-shared-expert-overlap",
        "--mtp-num-layers above 1: a plan": "--mtp-num-layers 2",
        "--pipeline-vocabulary: its exchanges": SHARED,
        "--pipeline-profile-steps: it measures": "--pipeline-profile-steps 1-2",
    },
    f"In pairs under Megatron's own schedule|{PAIRS}": {
        "full is not Megatron's in pairs": "--recompute-granularity full"
    },
    f"With `--overlap-moe-expert-parallel-comm`|{PAIRS.replace('--bf16 ', '')}": {
        "full precision: Megatron plans": "--pipeline-schedule 1f1b"
    },
    "What pairs need|": {
        " has none; write (3F1;3B0)OVERLAP_F_B": f"{PAIRS} --pipeline-schedule csv:alone.csv",
        'give --pipeline-costs a file with a "pair"': f"{PAIRS} --pipeline-schedule flex "
        "--pipeline-memory-limit 0.5",
        "which Megatron runs with --overlap-moe": f"{PP2} --pipeline-schedule csv:paired.csv",
    },
    f"Without a flush|{ONE}": {
        "--rampup-batch-size: the microbatches": "--rampup-batch-size 4 4 8",
        "--step-batch-size-schedule: the microbatches": "--step-batch-size-schedule 0:1",
        "--iterations-to-skip: stages have read": "--iterations-to-skip 3",
        "--result-rejected-tracker-filename: stages": "--result-rejected-tracker-filename x",
        "--overlap-param-gather: weights": "--overlap-param-gather",
        "--fp8-format: its weights are cast": "--fp8-format hybrid",
        "--fp4-format: its weights are cast": "--fp4-format e2m1",
        "cast for microbatch 0, which comes once": "--te-precision-config-file x",
        "runs the step again where they do not fit": "--moe-expert-rank-capacity-factor 2",
        "the bias has no versions": "--moe-router-enable-expert-bias",
        "no training without a flush was": "--use-distributed-optimizer "
        "--num-distributed-optimizer-instances 2",
        "--fine-grained-activation-offloading: it gives": "--fine-grained-activation-offloading",
    },
    f"Without a flush and without `--pipeline-allow-waits`|{ONE}": {
        "--mtp-num-layers: the first": "--mtp-num-layers 1",
        "--fp16: its overflow check": "--fp16",
        "--calculate-per-token-loss: all stages": "--calculate-per-token-loss",
        "--exit-signal-handler: all ranks": "--exit-signal-handler",
        "--exit-duration-in-mins: all ranks": "--exit-duration-in-mins 5",
        "add --no-barrier-with-level-1-timing": "--timing-log-level 1",
    },
    f"Without a flush and without `--pipeline-allow-waits`|{ONE.replace(UNTIED, '')}": {
        "add --untie-embeddings-and-output-weights, or allow it with --pipeline-allow-waits": ""
    },
    f"With `--pipeline-replicas`|{REPLICAS}": {
        "--pipeline-allow-waits: it sums": "--pipeline-allow-waits",
        "--log-params-norm: it sums": "--log-params-norm",
        "--num-experts: the losses of routers": "--num-experts 4",
        "--context-parallel-size: a replica has": "--context-parallel-size 2",
        "--overlap-grad-reduce: the replicas": "--overlap-grad-reduce",
        "--use-distributed-optimizer: its checkpoints": "--use-distributed-optimizer",
        "--optimizer dist_...: it": "--optimizer dist_muon",
        "--ddp-average-in-collective: gradients": "--ddp-average-in-collective",
        "--data-parallel-random-init: it counts": "--data-parallel-random-init",
        "--create-all-gather-group: its groups": "--create-all-gather-group",
        "--use-tp-pp-dp-mapping: ranks go by stage": "--use-tp-pp-dp-mapping",
        "--dataloader-type cyclic: it shares": "--dataloader-type cyclic",
        "--full-validation: it shares": "--full-validation --multiple-validation-sets",
        "--pipeline-trace: a trace has one rank": "--pipeline-trace trace.json",
        "auto chooses stages that take equally long, and": f"{LAYOUT} auto",
    },
    "What `--pipeline-profile-steps` needs|": {
        "there is no room under {schedule}; leave": f"{ONE} --pipeline-profile-steps 1-2"
    },
    "What a rehearsal needs|": {
        "start it with mpp rehearse": f"{PP2} --rehearse-pipeline x.json --pipeline-schedule v-half"
    },
    f"With `--profile-pipeline`|{PP2} --profile-pipeline x.json": {
        "under Megatron's own schedules; leave it out": "--pipeline-schedule zb-h1",
        "full: layers would run": "--recompute-granularity full",
        "--mtp-num-layers: its layers": "--mtp-num-layers 1",
        "the first step only warms up": "--train-iters 1",
    },
    f"In a rehearsal|{PP2} --rehearse-pipeline x.json --fake-process-group": {
        "choose flex, and give it the limit": "--pipeline-schedule auto",
        "it never flushes; choose another": "--pipeline-schedule pipedream",
        "--pipeline-trace: a rank that runs": "--pipeline-trace x.json",
        "--pipeline-profile-steps: ranks are": "--pipeline-profile-steps 2-3",
        "--profile-pipeline: it measures": "--profile-pipeline x.json",
        "its messages have two lengths; put the m": f"{LAYOUT} Et*7|tm|L --mtp-num-layers 1",
    },
    f"With `--pipeline-layer-seeds`|{PP2} --pipeline-layer-seeds": {
        "--init-model-with-meta-device: weights are drawn": "--init-model-with-meta-device"
    },
    "Under every schedule, Megatron's own too|": {
        "calls itself without end": "--recompute-granularity selective --recompute-modules mlp",
        "divides the ranks that share": "--num-distributed-optimizer-instances 2",
        "and Transformer Engine is not installed": "--hybrid-layer-pattern *-*-",
    },
    f"In every pipeline, Megatron's own too|{PP4} --disable-bias-linear": {
        "--logits-save-dir: it looks": "--logits-save-dir logits",
        "--logits-load-dir: it looks": "--logits-load-dir logits",
        "AssertionError; add --untie-emb": "--save x --mtp-num-layers 1 --position-embedding-type rope",
        "the layout has all that they say": f"{LAYOUT} Ett|tt|tt|ttL --account-for-loss-in-pipeline-split",
        "layers of a hybrid model have no plans": "--overlap-moe-expert-parallel-comm --spec my.layers stack "
        "--hybrid-layer-pattern *|*|*|*",
    },
    f"With several chunks a rank, under Megatron's own schedule too|{PP4}": {
        "without knowing for which of several chunks": "--num-virtual-stages-per-pipeline-rank 2 "
        "--heterogeneous-layers-config-path layers.json"
    },
    "With Megatron's local layers, the only ones that run on a CPU|": {
        "--experimental-attention-variant: Mega": "--experimental-attention-variant gated_delta_net",
        "local attention knows no latent keys": "--multi-latent-attention",
        "--moe-latent-size: the projections": "--num-experts 4 --disable-bias-linear --moe-latent-size 16",
    },
    "With attention of another kind|--transformer-impl transformer_engine": {
        "give --linear-attention-freq": "--experimental-attention-variant gated_delta_net",
        "chooses among compressed keys alone": "--experimental-attention-variant dsa",
        "has an indexer whose sizes": "--experimental-attention-variant dsa --multi-latent-attention",
        "latent attention has none": "--attention-output-gate --multi-latent-attention",
    },
    f"With `{LAYOUT} auto`|{PP4} --pipeline-schedule 1f1b {LAYOUT} auto": {
        "--decoder-first-pipeline-num-layers: it ": "--decoder-first-pipeline-num-layers 2",
        "--decoder-last-pipeline-num-layers: it ": "--decoder-last-pipeline-num-layers 2",
        "leave --account-for-embedding": "--account-for-embedding-in-pipeline-split",
        "leave --account-for-loss-in-pipeline-split out": "--account-for-loss-in-pipeline-split",
        "leave --num-layers-per": "--num-layers-per-virtual-pipeline-stage 1",
        "cuts such a model at the | in it; put": "--hybrid-layer-pattern **** --spec my.layers stack",
        "leave --pipeline-costs out": "--mtp-num-layers 1 --pipeline-costs x.json",
    },
}
"""The flags that break a rule, by an excerpt of it, for every title with the flags that all cases have."""

FLAT = [(title, excerpt) for title, cases in CASES.items() for excerpt in cases]


def rules_of(title: str) -> list[tuple[Rules, Rule]]:
    name = title.partition("|")[0]
    return [(rules, rule) for rules in all_rules.rules() for rule in rules.rows if rules.title == name]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules of two ranks with pairs and without."""
    monkeypatch.chdir(tmp_path)
    for paired, name in ((True, "paired"), (False, "alone")):
        csv_file.write(catalog.build("1f1b", 2, 8, paired=paired), Path(f"{name}.csv"))


@pytest.mark.parametrize(("title", "excerpt"), FLAT)
@pytest.mark.usefixtures("files")
def test_refused_in_one_line(title: str, excerpt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "_zstandard", lambda: "0")
    if excerpt == OLDER:
        monkeypatch.setattr(validation, "megatron_version", lambda: "0.17.1")
    name, _, base = title.partition("|")
    flags = f"{base} {CASES[title][excerpt]}"
    for flag in flags.split():
        if flag.startswith("--") and not has_flag(flag):
            pytest.skip(f"this Megatron has no {flag}")
    (expected,) = [rule for rules, rule in rules_of(title) if excerpt in rules.template(rule)]
    # What Megatron cannot run is refused under its own schedules and under others.
    also = "--pipeline-schedule 1f1b" if base and name.startswith("In every pipeline") else ""
    for schedule in {"", also}:
        with pytest.raises(Refused) as error:
            read(monkeypatch, f"{flags} {schedule}")
        assert error.value.rule is expected
        line = str(error.value)
        assert "\n" not in line and "None" not in line and ("{" in excerpt or excerpt in line)


def known_names() -> set[str]:
    flags = {row["dest"] for row in flag_table.rows()}
    return flags | set(flag_table.names())


def test_flags_that_no_part_of_a_job_has_are_flags() -> None:
    assert {field.name for field in fields(Flags)} <= known_names()


@pytest.mark.parametrize("from_file", [True, False])
def test_rules_ask_for_what_there_is(from_file: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that nothing has is None, and its rule would never hold, or say None."""
    known, plain = known_names(), RequestedJob.argument

    def argument(job: RequestedJob, name: str) -> object:
        assert name in known, f"{name} is no argument of any release"
        return plain(job, name)

    monkeypatch.setattr(RequestedJob, "argument", argument)
    schedule = catalog.build("v-half", 4, 8)
    ends = f"{PP4} --pipeline-schedule v-half --decoder-first-pipeline-num-layers 2"
    settled = {"placement": schedule.placement, "from_file": schedule} if from_file else {}
    job = RequestedJob.of_args(arguments(ends), {ENGINE: "2.2", "zstandard": "0"}, **settled)
    for rules in (
        *all_rules.rules(),
        schedules.TURNED_OFF,
        *stock.PLANNED,
        *flag_effects.lacks_costs(),
        flag_effects.not_compiled(),
    ):
        rules.when(job)
        for rule in rules.rows:
            rule.holds(job)
            names = {name for _, name, _, _ in string.Formatter().parse(rules.template(rule)) if name}
            functions = {function.__name__: function for function in (*rules.words, *rule.words)}
            for name in names - functions.keys():
                job.argument(name)
            assert {function.__name__ for function in rule.words} <= names
            if from_file:
                rules.sentence(rule, job)


@pytest.mark.parametrize(
    ("schedule", "off"),
    [("v-half", DEFER), ("zb-h1", f"{DEFER} {EARLY}"), ("pipedream", f"{DEFER} {EARLY}"), ("", "")],
)
def test_what_has_no_use_under_a_schedule_is_turned_off(
    schedule: str, off: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's own schedules get the flags as they are."""
    flags = f"{ONE.partition(' --pipeline-schedule')[0]} {DEFER} {EARLY}"
    args = arguments(f"{flags} --pipeline-schedule {schedule}" if schedule else flags)
    monkeypatch.setenv("WORLD_SIZE", "4")
    requested_by(args)
    left = [flag for flag in (DEFER, EARLY) if vars(args)[flag.removeprefix("--").replace("-", "_")]]
    assert left == [flag for flag in (DEFER, EARLY) if flag not in off]


def test_what_is_no_flag_with_a_value_needs_a_condition() -> None:
    with pytest.raises(ValueError, match="'--context-parallel-size above 1', which is no flag with a value"):
        Rule("--context-parallel-size above 1", "a rank has two pieces of a sequence")


def test_every_rule_has_a_case() -> None:
    excerpts = [(title.partition("|")[0], excerpt) for title, excerpt in FLAT]
    untested = [
        rule
        for rules in all_rules.rules()
        for rule in rules.rows
        if rules.title and not any(t == rules.title and e in rules.template(rule) for t, e in excerpts)
    ]
    assert not untested


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            "--pipeline-schedule v-half",
            "--pipeline-schedule v-half needs a pipeline of 2 ranks or more, got "
            "--pipeline-model-parallel-size 1; set it to 2 or more, or leave the flag out",
        ),
        (
            f"{PP4} --pipeline-schedule interleaved {LAYOUT} Et|t|t|t|ttttm|||L --mtp-num-layers 1",
            "--pipeline-schedule interleaved does not support multi-token prediction (m) in stage 4, counted "
            f"from 0, of {LAYOUT} Et|t|t|t|ttttm|||L: it must be in a rank's last chunk, and on the first "
            "rank next to the E or the L; put the m into stage 5 or 6 or 7",
        ),
        (
            f"{PP4} --pipeline-schedule v-half --decoder-first-pipeline-num-layers 1 "
            "--decoder-last-pipeline-num-layers 3",
            "--pipeline-schedule v-half does not support --decoder-first-pipeline-num-layers: a V has both "
            f"ends of the model on one rank; say where they go: {LAYOUT} 'E|t|t|t|t|t|tt|tL'",
        ),
        (
            f"{REPLICAS} --fp16",
            "--pipeline-schedule pipedream does not support --fp16: its overflow check needs all stages "
            "before every update; use --bf16",
        ),
    ],
)
def test_whole_lines(flags: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused) as error:
        read(monkeypatch, flags)
    assert str(error.value) == line


@pytest.mark.parametrize(
    "flags",
    [
        f"{ONE.replace(UNTIED, '--pipeline-allow-waits --fp16')}",
        f"{PP4} --pipeline-schedule auto --fp16 --loss-scale 1024",
        f"{PP4} --pipeline-schedule 1f1b --heterogeneous-layers-config-path layers.json",
        f"{PP4} --pipeline-schedule 1f1b --tp-comm-overlap",
        "--multi-latent-attention --spec my.layers stack",
        "--multi-latent-attention --transformer-impl transformer_engine",
        *(
            f"{PP4} --pipeline-schedule 1f1b --pipeline-vocabulary auto {flags}"
            for flags in (
                "--mtp-num-layers 1",
                "--init-model-with-meta-device",
                "--pipeline-profile-steps 1-2",
            )
        ),
    ],
)
def test_what_can_be_is_not_refused(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not share a vocabulary where ``auto`` has no choice."""
    pipeline = read(monkeypatch, flags)
    assert pipeline is None or not pipeline.placement.splits_head


@pytest.mark.parametrize(
    ("version", "is_refused"),
    [("1.13.0", True), ("2.2.1", True), ("2.3.0+f1a2b3", False), ("2.10.0", False), (None, False)],
)
def test_releases_are_compared_as_numbers(version: str | None, is_refused: bool) -> None:
    """Layers of Transformer Engine before 2.3 cannot leave a weight gradient for later."""
    args = arguments(f"{PP2} --pipeline-schedule zb-h1 --transformer-impl transformer_engine")
    releases = {} if version is None else {ENGINE: version}
    placement = Placement(Shape.LINEAR, 2)
    refuse(RequestedJob.of_args(args, releases, placement=placement, splits=False))
    asked = RequestedJob.of_args(args, releases, placement=placement, splits=True)
    if not is_refused:
        refuse(asked)
        return
    with pytest.raises(Refused, match=f"layers of Transformer Engine {version} cannot leave their weight"):
        refuse(asked)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("num_microbatches_with_partial_activation_checkpoints", 1),
        ("dynamic_context_parallel", True),
        ("delay_wgrad_compute", True),
    ],
)
def test_what_only_the_model_s_config_has(setting: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"does not support {setting} in the model's config"):
        refuse_config(SimpleNamespace(**{setting: value}))
    refuse_config(Namespace(cuda_graph_impl="none"))


def test_pairs_put_weight_gradients_off_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag is accepted, and layers are built without it."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    args = arguments(f"{PAIRS} --pipeline-schedule dualpipe-v --delay-wgrad-compute")
    assert requested_by(args)
    assert not args.delay_wgrad_compute


@pytest.mark.parametrize("graphs", [GRAPHS, PER_LAYER])
@pytest.mark.parametrize("schedule", ["v-half", "zb-h1", "interleaved", "1f1b"])
def test_graphs_are_permitted_unproved(graphs: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, f"{PP4} {graphs} --pipeline-unproved --pipeline-schedule {schedule}")


@pytest.mark.parametrize("flags", ["--rampup-batch-size 4 4 100", "--pipeline-profile-steps 1-2"])
def test_graphs_of_layers_go_with_steps_that_differ(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = f"{PP4} {UNTIED} {PER_LAYER} --pipeline-unproved --pipeline-schedule v-half"
    assert read(monkeypatch, f"{job} {flags}")
