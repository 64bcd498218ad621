"""``mpp estimate`` and ``mpp search``: what they print and write, and how they refuse."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_pp_ext.cli import measure, report
from megatron_pp_ext.jobs.job import Result, RunState
from megatron_pp_ext.planner.search.best_first import Search
from tests.support import browser

MODEL = {
    "num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 32000, "bf16": True,
    "micro_batch_size": 1,
}  # fmt: skip
SHARED = {"pipeline_vocabulary": "shared"}
PIPELINE = {"pipeline_model_parallel_size": 4, "pipeline_schedule": "v-half", "seq_length": 512}


@pytest.fixture
def model(tmp_path):
    def write(**changed):
        file = tmp_path / "model.json"
        file.write_text(json.dumps({**MODEL, **changed}))
        return file

    return write


def test_estimate_tells_time_and_every_ranks_memory(mpp, model, tmp_path):
    file = tmp_path / "estimate.json"
    result = mpp(
        "estimate", "--world-size", 8, "--model", model(**PIPELINE, global_batch_size=16), "--json", file
    )
    assert result.exit_code == 0, result.output
    assert "v-half on 8 x h100, 2 data-parallel, 8 microbatches" in result.output
    content = json.loads(file.read_text())
    assert len(content["ranks"]) == 4
    assert 0 < content["pipeline_seconds"] < content["step_seconds"]
    assert f"MFU {content['utilisation']:.1%}" in result.output
    total = sum(content["ranks"][0].values())
    assert f"{total / 1e9:.2f}" in result.output


def test_estimate_reports_what_waits_for_weight_gradients(mpp, model, tmp_path):
    file = tmp_path / "estimate.json"

    def estimated(schedule, **changed):
        described = model(**{**PIPELINE, "pipeline_schedule": schedule, **changed}, global_batch_size=16)
        result = mpp("estimate", "--model", described, "--json", file)
        assert result.exit_code == 0, result.output
        return " ".join(result.output.split()), json.loads(file.read_text())

    output, content = estimated("1f1b")
    assert (content["waiting_bytes"], content["gather_bytes"]) == ([], 0)
    assert "wait for weight gradients" not in output
    output, alone = estimated("v-half")
    most = max(alone["waiting_bytes"])
    rank = alone["waiting_bytes"].index(most)
    assert 0 < most < alone["ranks"][rank]["activations"]
    assert f"up to {most / 1e9:.2f} GB of activations on rank {rank} wait for weight gradients" in output
    assert "which gather operands" not in output
    output, cut = estimated("v-half", tensor_model_parallel_size=2, sequence_parallel=True)
    hidden = 2 * 512 * 1024
    assert cut["gather_bytes"] == 3 * hidden
    assert f"which gather operands in {3 * hidden / 1e9:.2f} GB of the buffers" in output
    assert max(cut["waiting_bytes"]) == pytest.approx(most / 2)


def test_estimate_shows_megatrons_own_schedules_beside_it(mpp, model, tmp_path):
    """The same seconds and bytes as an estimate of each alone; the shortest interleaved is shown."""
    file = tmp_path / "estimate.json"

    def estimated(*flags, **changed):
        described = model(**{**PIPELINE, **changed}, num_layers=16, global_batch_size=16, vocab_size=128000)
        result = mpp("estimate", "--model", described, "--json", file, "--", *flags)
        assert result.exit_code == 0, result.output
        content = json.loads(file.read_text())
        return result.output, content, max(sum(rank.values()) for rank in content["ranks"])

    output, content, _ = estimated()
    found = content["compared"]
    _, stock, fullest = estimated(pipeline_schedule=None)
    assert stock["compared"] is None
    assert found["stock"]["step_seconds"] == pytest.approx(stock["step_seconds"])
    assert found["stock"]["fullest_bytes"] == pytest.approx(fullest)
    assert f"stock 1F1B: {stock['step_seconds']:.4g} s, {fullest / 1e9:.1f} GB" in output
    virtual = "--num-virtual-stages-per-pipeline-rank"
    steps = {
        chunks: estimated(virtual, chunks, pipeline_schedule=None)[1]["step_seconds"] for chunks in (2, 4)
    }
    best = min(steps, key=steps.__getitem__)
    assert found["interleaved"]["step_seconds"] == pytest.approx(steps[best])
    assert f"stock interleaved, {best} chunks a rank: {steps[best]:.4g} s" in output
    _, shared, fullest = estimated(pipeline_vocabulary="auto")
    assert shared["compared"]["shared"] is None
    assert found["shared"]["step_seconds"] == pytest.approx(shared["step_seconds"])
    assert f"with --pipeline-vocabulary auto: {shared['step_seconds']:.4g} s" in output
    assert found["shared"]["step_seconds"] < 0.98 * content["step_seconds"]


def test_estimate_warns_of_a_schedule_that_is_predicted_to_lose(mpp, model, tmp_path):
    """GPipe takes as long as 1F1B and keeps everything; V-ZB wins with few microbatches."""

    def warned(schedule):
        file = tmp_path / "estimate.json"
        described = model(**{**PIPELINE, "pipeline_schedule": schedule}, global_batch_size=16, vocab_size=512)
        result = mpp("estimate", "--model", described, "--json", file)
        assert result.exit_code == 0, result.output
        content = json.loads(file.read_text())
        for line in content["compared"]["warnings"]:
            assert line in " ".join(result.output.split())
        steps = content["compared"]
        return steps["warnings"], steps["chosen"], steps["stock"], steps["interleaved"]

    (line,), chosen, _, other = warned("gpipe")
    slower = chosen["step_seconds"] / other["step_seconds"] - 1
    more = (chosen["fullest_bytes"] - other["fullest_bytes"]) / 1e9
    assert line == (
        f"warning: gpipe is predicted to take {slower:.1%} longer than {other['name']}, and {more:.1f} GB "
        "more on the fullest rank"
    )
    lines, chosen, *others = warned("v-zb")
    assert not lines and all(chosen["step_seconds"] <= other["step_seconds"] for other in others)


def test_what_is_not_counted_is_said_beside_the_numbers(mpp, model, tmp_path):
    file = tmp_path / "found.json"
    of_search = "search", "--gpus", 4, "--global-batch-size", 8, "--schedules", "1f1b", "--seq-length", 512
    said = "--apply-layernorm-1p (longer: kernels are added, or no longer fused or hidden)"
    for command, values in (("estimate",), PIPELINE), (of_search, {}):
        result = mpp(*command, "--model", model(**values, layernorm_zero_centered_gamma=True), "--json", file)
        assert result.exit_code == 0, result.output
        assert said in " ".join(result.output.split())
        assert json.loads(file.read_text())["not_counted"] == [said]
    assert "is made without" not in mpp("estimate", "--model", model(**PIPELINE)).output


def test_estimate_says_what_does_not_fit(mpp, model):
    huge = model(**{**PIPELINE, "hidden_size": 16384, "num_layers": 80})
    output = mpp("estimate", "--model", huge).output
    assert "does not fit: rank 0 needs" in output
    no_batch = "no --global-batch-size: a step of one microbatch for each data-parallel rank is estimated"
    assert no_batch in " ".join(output.split())
    with_batch = mpp("estimate", "--model", huge, "--global-batch-size", 8).output
    assert "no --global-batch-size" not in with_batch


def test_estimate_of_a_shared_vocabulary(mpp, model, tmp_path):
    """``auto`` takes the shorter and says so; the line to paste has the flag as it was given."""
    found, outputs = {}, {}
    for vocabulary in (None, "shared", "auto"):
        file, flag = tmp_path / f"{vocabulary}.json", f"--pipeline-vocabulary {vocabulary}"
        words = ["--json", file, "--", *(flag.split() if vocabulary else ())]
        large = model(**PIPELINE, global_batch_size=16, vocab_size=256000)
        result = mpp("estimate", "--model", large, *words)
        assert result.exit_code == 0, result.output
        found[vocabulary], outputs[vocabulary] = json.loads(file.read_text()), result.output
        assert (flag in result.output) is (vocabulary is not None)
    saved = 1 - found["shared"]["pipeline_seconds"] / found[None]["pipeline_seconds"]
    assert found["auto"]["ranks"] == found["shared"]["ranks"] != found[None]["ranks"]
    assert f"vocabulary shared: steps are {saved:.1%} shorter" in outputs["auto"]
    assert len({rank["loss"] for rank in found["shared"]["ranks"]}) == 1


def test_estimate_of_activations_on_the_host(mpp, model, tmp_path):
    """Half of V-Half's activations leave for nothing: its stages take longer than their copies."""
    found = []
    for asked in ({}, {"pipeline_offload": 0.5}):
        file = tmp_path / "estimate.json"
        given = model(**PIPELINE, **asked, global_batch_size=16)
        result = mpp("estimate", "--world-size", 4, "--model", given, "--json", file)
        assert result.exit_code == 0, result.output
        found.append(json.loads(file.read_text()))
    without, offloaded = found
    assert offloaded["step_seconds"] == pytest.approx(without["step_seconds"])
    kept = [max(rank["activations"] for rank in one["ranks"]) for one in found]
    assert kept[1] < kept[0]
    assert without["host_bytes"] == [] and max(offloaded["host_bytes"]) > kept[0] - kept[1]
    assert f"on the host: {max(offloaded['host_bytes']) / 1e9:.2f} GB of the rank with most" in result.output


SIZES = ("--global-batch-size", 16, "--seq-length", 512, "--schedules", "1f1b,v-half")
UNEVEN = {"num_layers": 9, "hidden_size": 4096}
SEARCH = ("search", "--gpus", 16, *SIZES)


def test_search_shows_megatrons_own_schedules_at_the_sizes_of_the_best(mpp, model, tmp_path):
    json_file, page, alone = (tmp_path / name for name in ("found.json", "found.html", "alone.json"))
    sizes = "--pipeline-model-parallel-size", 4, "--tensor-model-parallel-size", 1, "--micro-batch-size", 1
    described = model(num_layers=16)
    result = mpp(
        *("search", "--gpus", 4, "--global-batch-size", 16, "--seq-length", 512, "--schedules", "v-zb"),
        *("--model", described, "--json", json_file, "--html", page, "--", *sizes),
    )
    assert result.exit_code == 0, result.output
    content = json.loads(json_file.read_text())
    found, best = content["compared"], content["best"][0]["estimate"]
    assert found["chosen"]["step_seconds"] == best["step_seconds"] < found["stock"]["step_seconds"]
    overlap = "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"
    batch = "--global-batch-size", 16, "--seq-length", 512
    mpp("estimate", "--model", described, *batch, "--json", alone, "--", *sizes, *overlap)
    stock = json.loads(alone.read_text())
    assert found["stock"]["step_seconds"] == pytest.approx(stock["step_seconds"])
    shown = f"stock 1F1B: {stock['step_seconds']:.4g} s"
    assert shown in result.output and shown in page.read_text()
    output = " ".join(result.output.split())
    assert "of those that were tried, none of the others can be among the best" in output
    shared = {row["flags"]: row for row in content["flags_not_tried"]}["--pipeline-vocabulary shared"]
    line = f"--pipeline-vocabulary shared: {shared['step_seconds']:.4g} s"
    assert line in output and line in page.read_text()
    added = content["with_flags"]
    assert added["estimate"]["step_seconds"] <= shared["step_seconds"]
    assert f"<summary>{added['name']} with {added['added_flags']}</summary>" in page.read_text()
    assert page.read_text().count("<tr class=stock>") == 2
    assert shlex.split(added["command"])[-len(added["flags"]) :] == added["flags"]


def test_search_writes_table_numbers_page_picture_and_scripts(mpp, model, tmp_path):
    files = {name: tmp_path / f"found.{name}" for name in ("json", "html", "svg")}
    wanted = [word for name, file in files.items() for word in (f"--{name}", file)]
    result = mpp(
        *SEARCH,
        "--top",
        3,
        "--memory",
        "12GB",
        "--model",
        model(**UNEVEN),
        *wanted,
        "--sbatch",
        tmp_path / "jobs",
    )
    assert result.exit_code == 0, result.output
    content = json.loads(files["json"].read_text())
    page, best = files["html"].read_text(), content["best"]
    title = f"{tmp_path / 'model.json'} on 16 x h100, 16 sequences of 512 tokens a step"
    assert f"<title>{title}</title>" in page
    assert (content["model"], content["global_batch_size"], content["seq_length"]) == (
        str(tmp_path / "model.json"), 16, 512,
    )  # fmt: skip
    assert content["command"] in page and "search --gpus 16" in content["command"] and content["date"] in page
    assert f"{content['legal']:,} configurations of 16 x h100" in page
    assert (
        page.index("<svg")
        < page.index("<table")
        < page.index(f"<summary>{best[0]['name']}</summary>")
        < page.index(f"<summary>{best[1]['name']}</summary>")
    )
    assert page.count("<details open>") == 1
    alike = [other for one in best for other in one["alike"]]
    for one in (*best, *content["for_less_memory"], *alike):
        layout = one["candidate"]["layout"]
        assert layout is None or shlex.join(["--pipeline-model-parallel-layout", layout]) in one["command"]
    assert any(
        one["candidate"]["layout"] for one in content["for_less_memory"] if one["name"] != best[0]["name"]
    )
    shown = " ".join(result.output.replace("\\\n", "").split())
    for one in content["for_less_memory"]:
        assert f"<summary>{one['name']}</summary>" in page
        assert shlex.join(one["flags"][one["flags"].index("--tensor-model-parallel-size") :]) in shown
    steps = [one["estimate"]["step_seconds"] for one in best]
    assert steps == sorted(steps)
    assert len(steps) == 3
    assert best[0]["name"] in result.output
    assert all(one["name"] in page for one in best)
    assert "<svg" in files["svg"].read_text()
    scripts = sorted((tmp_path / "jobs").iterdir())
    assert [script.name for script in scripts] == [f"0{n}-{one['name']}.sh" for n, one in enumerate(best, 1)]
    for script, one in zip(scripts, best, strict=True):
        subprocess.run(["bash", "-n", str(script)], check=True)
        words = shlex.split(script.read_text().splitlines()[-1])
        assert "--nodes=2" in words
        (batch,) = (word for word in words if word.endswith("scripts/slurm_one_task_per_node.sbatch"))
        assert Path(batch).is_file()
        assert words[words.index(batch) + 1 : -1] == one["flags"]
        assert shlex.split(one["command"])[-len(one["flags"]) :] == one["flags"]


def test_a_search_that_is_interrupted_before_it_finds_anything_reports_that(mpp, model, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "run", interrupted)
    result = mpp(*SEARCH, "--model", model())
    assert result.exit_code == 130
    assert "mpp: interrupted before any configuration was found that fits" in result.output


@pytest.mark.skipif(browser.BROWSER is None, reason="no Chromium is installed")
def test_a_browser_shows_the_page_of_a_search_whole(mpp, model, tmp_path):
    """Names in the picture are cut nowhere, and nothing lies over another thing or over the limit."""
    page = tmp_path / "found.html"
    assert mpp(*SEARCH, "--top", 3, "--model", model(), "--html", page).exit_code == 0
    shown = "svg, [id^=name-], #limit, #legend, #points use"
    boxes, too_wide = browser.drawn(page, shown, tmp_path)
    assert too_wide == 0
    assert browser.drawn(page, shown, tmp_path, width=420)[1] == 0
    ((left, top, right, bottom),) = boxes.pop("")
    names = [box for name, (box, *_) in boxes.items() if name.startswith("name-")]
    assert names
    for box in names:
        assert left <= box[0] < box[2] <= right
        assert top <= box[1] < box[3] <= bottom
        covered = [other for found in boxes.values() for other in found if _overlap(box, other)]
        assert covered == [box]
    assert not _overlap(*boxes["legend"], *boxes["limit"])


def _overlap(box: list[float], other: list[float]) -> bool:
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]


def test_what_flags_settle_stays(mpp, model, tmp_path):
    file = tmp_path / "found.json"
    settled = model(tensor_model_parallel_size=2, pipeline_model_parallel_size=4)
    assert mpp(*SEARCH, "--model", settled, "--json", file).exit_code == 0
    found = json.loads(file.read_text())["best"]
    assert {(one["candidate"]["tensor"], one["candidate"]["pipeline"]) for one in found} == {(2, 4)}


def test_a_search_of_both_ways_to_hold_a_vocabulary(mpp, model, tmp_path):
    """A line to paste tells training what was found, and not to decide again."""
    file = tmp_path / "found.json"
    pipeline = {"pipeline_model_parallel_size": 4, "pipeline_vocabulary": "auto"}
    result = mpp(*SEARCH, "--model", model(**pipeline), "--json", file, "--top", 40)
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())["best"]
    assert {one["candidate"]["shares_vocabulary"] for one in found} == {False, True}
    for one in found:
        shared = " --pipeline-vocabulary shared" * one["candidate"]["shares_vocabulary"]
        assert one["command"].count("--pipeline-vocabulary") == bool(shared)
        assert shared in one["command"]


@pytest.mark.parametrize(
    ("words", "changed", "message"),
    [
        ((*SEARCH, "--system", "h1000"), {}, "did you mean 'h100'?"),
        ((*SEARCH, "--memory", 1e6), {}, "the model fits nowhere:"),
        ((*SEARCH, "--memory", -5), {}, "--memory is -5, but must be a number of bytes"),
        ((*SEARCH, "--json", "nowhere/x.json"), {}, "nowhere/x.json: no such folder; make it first"),
        ((*SEARCH, "--margin", "nan"), {}, "--margin is nan, but must be 0 or more"),
        (SEARCH, {"hybrid_layer_pattern": "M*|M*|M*|M*"}, "changes: leave every | of it out"),
        ((*SEARCH, "--schedules", "v-hal"), {}, "did you mean 'v-half'?"),
        (SEARCH, {"pipeline_schedule": "v-zb"}, "v-half and --pipeline-schedule v-zb contradict"),
        (("search", "--gpus", 7, "--layout", "even", *SIZES), {}, "no combination of parallel sizes"),
        (SEARCH, {**SHARED, "pipeline_model_parallel_size": 1}, "shared needs a pipeline of 2 ranks"),
        ((*SEARCH, "--png", "x.svg"), {}, "--png got x.svg: end the file's name in .png"),
        (("search", "--gpus", 8), {"seq_length": 512}, "no batch: give --global-batch-size"),
        (SEARCH, {"pipeline_offload": "0.5"}, "-offload is 0.5, but a search chooses a share itself"),
        (SEARCH, {"pipeline_loss_rank": "last"}, "-rank last: a search counts ranks from the one with"),
        (SEARCH, {"decoder_first_pipeline_num_layers": 1}, "-pipeline-num-layers describes the stages"),
        (("estimate",), {}, "has no --seq-length: give it"),
        (("estimate",), {**PIPELINE, **SHARED, "pipeline_schedule": None}, "add --pipeline-schedule"),
        (("estimate", "--world-size", 0), {"seq_length": 512}, "--world-size is 0"),
        (
            ("estimate",),
            {**PIPELINE, "pipeline_profile_steps": "2-1"},
            "--pipeline-profile-steps 2-1 ends before it starts",
        ),
        (("estimate", "--world-size", 6), {**PIPELINE}, "nearest that work are 4 or 8"),
        (("estimate",), {"hidden": 3, "seq_length": 512}, "'hidden' is unknown: did you mean 'hidden_size'?"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(mpp, model, words, changed, message):
    result = mpp(*words, "--model", model(**changed))
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_the_fastest_measured_is_told(mpp, model, monkeypatch):
    """Not the one that was estimated to be."""

    def run(commands, *_):
        seconds = {name: 9.0 - number for number, name in enumerate(commands)}
        return {name: Result(name, RunState.COMPLETED, seconds[name]) for name in commands}

    monkeypatch.setattr(measure, "run", run)
    monkeypatch.setattr(measure.RunPlace, "check", lambda *_: None)
    output = mpp(*SEARCH, "--top", 2, "--measure", "--model", model()).output
    estimated, measured = output.split("To run the best:")[1].split("To run the fastest measured:")
    best, fastest = (text.split("Placeholders")[0] for text in (estimated, measured))
    assert "torchrun " in best
    assert "torchrun " in fastest
    assert best != fastest


def test_flags_go_before_the_models_own(mpp, model):
    """And it is said, where nothing that is to be pasted stands."""
    result = mpp(
        "estimate", "--model", model(**PIPELINE), "--print-flags", "--", "--num-layers", 16, "--fp16"
    )
    assert result.exit_code == 0, result.output
    words = result.stdout.split()
    assert (words.count("--num-layers"), words.count("--bf16"), words.count("--fp16")) == (1, 0, 1)
    assert words[words.index("--num-layers") + 1] == "16"
    assert "--num-layers 16 (8)" in result.stderr
    assert "no model: give --model NAME" in mpp("estimate").stderr


def test_what_is_printed_is_read_by_a_shell_and_fits_80_columns(mpp, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(report.console, "width", 80)
    sizes = "--pipeline-model-parallel-size 16 --tensor-model-parallel-size 2 --global-batch-size 64"
    words = [*sizes.split(), "--pipeline-schedule", "v-half", "--num-layers", 64]
    shown = mpp("estimate", "--model", "llama3-8b", "--json", tmp_path / "a.json", "--", *words)
    assert shown.exit_code == 0, shown.output
    searched = mpp(*SEARCH, "--model", "mixtral-8x7b", "--top", 3)
    for output in (shown.output, searched.output, mpp("models").output):
        assert "…" not in output
        assert max(map(len, output.splitlines())) <= 80
    assert any(line.split()[-1:] == ["15"] for line in shown.output.splitlines())
    content = json.loads((tmp_path / "a.json").read_text())
    command = shown.stdout.split("To train it:\n")[1].split("Placeholders")[0]
    asked = "torchrun() { echo $CUDA_DEVICE_MAX_CONNECTIONS; printf '%s\\n' \"$@\"; }\nMASTER_ADDR=a\n"
    heard = subprocess.run(["bash", "-c", asked + command], capture_output=True, text=True, check=True)
    queues, *given = heard.stdout.splitlines()
    assert queues == "1"
    assert given[-len(content["flags"]) :] == content["flags"]


def test_a_named_model_is_estimated_without_torch_or_numba_and_a_typo_refused_at_once():
    code = "import sys\nfrom megatron_pp_ext.cli import app\n"
    code += "try:\n    app(sys.argv[1:])\nfinally:\n    print(*sys.modules)"
    for words, status in (("--tensor-model-parallel-size", 0), ("--tensor-model-paralel-size", 2)):
        line = [sys.executable, "-c", code, "estimate", "--no-ask", "--model", "llama3-8b", "--", words, "2"]
        ended = subprocess.run(line, capture_output=True, text=True, check=False)
        assert ended.returncode == status, ended.stderr
        assert not {"torch", "megatron.core", "numba"} & set(ended.stdout.split())
    assert "did you mean '--tensor-model-parallel-size'?" in ended.stderr
