"""``mpp profile``: a run that fails leaves what was there."""

import subprocess


def test_a_run_that_fails_leaves_the_profile_that_was_there(mpp, tmp_path, monkeypatch):
    real = subprocess.Popen

    def fail(words, **_):
        assert str(file) not in words
        return real(["sh", "-c", "exit 7"], start_new_session=True)

    file = tmp_path / "gold.json"
    file.write_text("precious")
    monkeypatch.setattr(subprocess, "Popen", fail)
    result = mpp("profile", file, "--", "--num-layers", 2)
    assert result.exit_code == 2
    assert "the profiled run ended with status 7 and no profile" in result.stderr
    assert file.read_text() == "precious"


def test_a_profile_needs_a_folder(mpp, tmp_path):
    result = mpp("profile", tmp_path / "nowhere" / "x.json", "--", "--num-layers", 2)
    assert "no such folder; make it first" in result.stderr
