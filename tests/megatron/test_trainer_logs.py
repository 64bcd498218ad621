"""Numbers of the pipeline in other trainers' logs: where they stand, when they are measured, and when not."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.module import MegatronModule

from megatron_pp_ext.compiler.request import named
from megatron_pp_ext.megatron import by_call, doctor, requested
from megatron_pp_ext.megatron.core import chunk_pipelines
from megatron_pp_ext.megatron.frameworks import trainer_logs
from megatron_pp_ext.megatron.requested import LastStep, Pipeline
from megatron_pp_ext.megatron.step_numbers import BUBBLE

NUMBERS = {BUBBLE: 0.25}


class Chunk(MegatronModule):
    """A chunk of a model of megatron.core."""

    def __init__(self) -> None:
        super().__init__(config=None)


class Writer:
    """A writer of any trainer, which notes what it gets."""

    def __init__(self) -> None:
        self.lines: list[Any] = []

    def add_scalar(self, name: str, number: float, iteration: int) -> None:
        self.lines.append((name, number, iteration))

    def log(self, numbers: dict[str, float], iteration: int) -> None:
        self.lines.append((numbers, iteration))

    def log_metrics(self, numbers: dict[str, float], step: int) -> None:
        self.lines.append((numbers, step))


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    """The pipeline in force, which has measured ``NUMBERS`` since somebody wanted them."""
    last_step = LastStep()
    pipeline = Pipeline(named("v-half", 2, 8), last_step=last_step)
    last_step.numbers = lambda: dict(NUMBERS) if last_step.is_wanted else {}
    with requested.using(pipeline):
        yield pipeline


def test_bridge_writes_at_its_interval(pipeline: Pipeline) -> None:
    printed: list[str] = []
    print_last = trainer_logs.print_fields(printed.append)

    def training_log(config: Any, global_state: Any, model: Any) -> bool:
        print_last(f"iteration {global_state.train_state.step} |")
        return True

    log = trainer_logs.log_of_bridge(training_log)
    tensorboard, wandb, mlflow, comet = writers = [Writer() for _ in range(4)]
    config, state = SimpleNamespace(logger=SimpleNamespace(log_interval=2)), SimpleNamespace()
    state.tensorboard_logger, state.wandb_logger, state.mlflow_logger, state.comet_logger = writers
    for step in range(1, 5):
        state.train_state = SimpleNamespace(step=step)
        pipeline.last_step.is_logged = step != 4
        assert log(config, state, model=[Chunk()])
    fields = f" pipeline: {pipeline.name} | bubble: 0.250 |"
    assert printed == ["iteration 1 |", f"iteration 2 |{fields}", "iteration 3 |", "iteration 4 |"]
    assert tensorboard.lines == [(BUBBLE, 0.25, 2)]
    assert wandb.lines == comet.lines == [(NUMBERS, 2)]
    assert mlflow.lines == [({"pipeline_bubble": 0.25}, 2)]


def test_swift_has_them_among_its_own_but_in_no_evaluation(pipeline: Pipeline) -> None:
    logged: list[dict[str, float]] = []

    def on_log(trainer: Any, logs: dict[str, float], prefix: str = "") -> None:
        logged.append(logs)

    log, trainer = trainer_logs.log_of_swift(on_log), SimpleNamespace(wrapped_models=[Chunk()])
    log(trainer, logs={"loss": 1.0})
    log(trainer, {"loss": 2.0}, prefix="eval_")
    pipeline.last_step.is_logged = False
    log(trainer, {"loss": 3.0})
    assert logged == [{"loss": 1.0, **NUMBERS}, {"loss": 2.0}, {"loss": 3.0}]


def test_verl_has_them_on_the_rank_that_returns_metrics(pipeline: Pipeline) -> None:
    """Ranks without metrics measure too, since all ranks of a pipeline meet for the numbers."""
    calls: list[str] = []

    def measured() -> dict[str, float]:
        calls.append("measured")
        return dict(NUMBERS)

    pipeline.last_step.numbers = measured
    results = iter([None, {"metrics": {"loss": 1.0}}, {"metrics": {"loss": 2.0}}, None])
    train = trainer_logs.log_of_verl(lambda worker, data: next(results))
    worker = SimpleNamespace(engine=SimpleNamespace(module=[Chunk()]))
    assert train(worker, "data") is None
    assert calls == ["measured"]
    assert train(worker, data="data") == {"metrics": {"loss": 1.0, **NUMBERS}}
    for module in ([torch.nn.Linear(1, 1)], torch.nn.Linear(1, 1)):
        worker.engine.module = module  # what engines without Megatron have
        assert (train(worker, "data") or {"metrics": {"loss": 2.0}}) == {"metrics": {"loss": 2.0}}
    assert calls == ["measured", "measured"]


def test_a_model_of_its_own_schedule_has_its_own_numbers(pipeline: Pipeline) -> None:
    """The numbers go by the model that the trainer logs, not by what is in force at that time."""
    other, stocks = Chunk(), Chunk()
    chunk_pipelines.remember(other, pipeline)
    chunk_pipelines.remember(stocks, None)
    logged: list[dict[str, float]] = []
    log = trainer_logs.log_of_swift(lambda trainer, logs, prefix="": logged.append(logs))
    with requested.using(None):
        for chunk in (other, stocks):
            log(SimpleNamespace(wrapped_models=[chunk]), {})
    assert logged == [NUMBERS, {}]


@pytest.mark.parametrize("log", [True, False])
def test_the_environment_leaves_them_out(log: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, in_force = by_call.read("v-half", ranks=2, microbatches=8).pipeline()
    monkeypatch.setattr(by_call, "install", lambda **arguments: in_force)
    by_call.install_by_variables({}, log=log)
    assert pipeline.last_step.is_logged == log


@pytest.mark.parametrize(
    ("parameters", "fits"),
    [("self, logs, prefix=''", "yes"), ("self, logs, state", "no: the log is without them")],
)
def test_doctor_reads_a_trainer_without_importing_it(
    parameters: str, fits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that another version has elsewhere is no reason to refuse the machine."""
    folder = tmp_path / "swift" / "megatron" / "trainers"
    folder.mkdir(parents=True)
    (tmp_path / "swift" / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "base.py").write_text(f"class BaseMegatronTrainer:\n    def on_log({parameters}): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "_hooks", lambda cpu=True: ())  # those of this process are in place
    details: list[Any] = []
    assert doctor.examine_hooks(details) == []
    places, *_, verdicts = (list(column.cells) for column in details[0].columns)
    assert verdicts[places.index("swift.megatron.trainers.base.BaseMegatronTrainer.on_log")] == fits
