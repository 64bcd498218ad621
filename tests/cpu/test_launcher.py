"""python -m megatron_pp_ext SCRIPT.py ARGS..."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_pp_ext import __main__ as launcher
from megatron_pp_ext import cpu, megatron


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "no training script given"),
        (["--cpu"], "no training script given"),
        (["--gpu", "script.py"], "unknown option --gpu"),
        (["missing.py"], "missing.py does not exist"),
        ([os.path.dirname(__file__)], "is a folder"),
    ],
)
def test_mistakes_get_one_line(words: list[str], problem: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        launcher.main(words)
    assert end.value.code == 2
    printed = capsys.readouterr().err
    assert problem in printed
    assert launcher.USAGE in printed
    assert printed.count("\n") == 1


def test_a_job_that_is_told_to_save_while_it_imports_ends_without_a_traceback(tmp_path: Path) -> None:
    """A batch script tells its ranks by SIGINT; here it comes while Megatron is imported."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron/__init__.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    (tmp_path / "script.py").touch()
    words = [sys.executable, "-m", "megatron_pp_ext", str(tmp_path / "script.py")]
    told = ["--exit-signal-handler", "--exit-signal", "SIGINT"]
    ended = subprocess.run([*words, *told], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr.splitlines() == ["megatron_pp_ext imports torch and Megatron: 10 to 60 seconds"]
    own = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "KeyboardInterrupt" in own.stderr


def test_its_first_line_comes_before_torch_is_imported(tmp_path: Path) -> None:
    """Under torchrun all else is silent for as long as torch and Megatron take to import."""
    (tmp_path / "script.py").touch()
    program = "import sys; sys.modules['torch'] = None; from megatron_pp_ext.__main__ import main; main()"
    words = [sys.executable, "-c", program, str(tmp_path / "script.py")]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.stderr.splitlines() == [
        "megatron_pp_ext imports torch and Megatron: 10 to 60 seconds",
        "megatron_pp_ext: torch is not installed: pip install 'megatron_pp_ext[train]'",
    ]


def test_help(capsys: pytest.CaptureFixture) -> None:
    launcher.main(["--help"])
    assert launcher.USAGE in capsys.readouterr().out


def test_the_script_runs_as_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder comes first on the path, in place of the current one, and it sees its own arguments."""
    prepared = []
    monkeypatch.setattr(launcher, "prepare", prepared.append)
    monkeypatch.setattr(sys, "path", ["current folder", "installed packages"])
    monkeypatch.setattr(sys, "argv", ["launcher"])
    script = tmp_path / "script.py"
    script.write_text(
        "import json, pathlib, sys\n"
        "pathlib.Path(__file__).with_suffix('.json').write_text(json.dumps([__name__, sys.argv, sys.path]))\n"
    )
    launcher.main(["--cpu", str(script), "--lr", "--help"])
    name, argv, path = json.loads(script.with_suffix(".json").read_text())
    assert prepared == [True]
    assert name == "__main__"
    assert argv == [str(script), "--lr", "--help"]
    assert path == [str(tmp_path), "installed packages"]


def test_cpu_may_be_said_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a batch script, for one, and by the user."""
    for module, names in ((cpu, ("install", "fork_checkpoint_writers")), (megatron, ("install",))):
        for name in names:
            monkeypatch.setattr(module, name, lambda *given: None)
    monkeypatch.setattr(cpu, "with_cpu_flags", lambda words: [*words, "--needed"])
    monkeypatch.setattr(sys, "argv", ["script", "--cpu", "--lr", "1", "--cpu"])
    launcher.prepare()
    assert sys.argv == ["script", "--lr", "1", "--needed"]


def test_a_link_stands_for_the_script_that_it_leads_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "prepare", lambda cpu: None)
    monkeypatch.setattr(sys, "path", ["current folder", "installed packages"])
    monkeypatch.setattr(sys, "argv", ["launcher"])
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "beside_the_script.py").touch()
    (tmp_path / "checkout" / "script.py").write_text("import beside_the_script\n")
    (tmp_path / "link.py").symlink_to(tmp_path / "checkout" / "script.py")
    launcher.main([str(tmp_path / "link.py")])
