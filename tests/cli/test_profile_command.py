"""``mpp profile``: a run that fails leaves what was there, and says where its log is."""

from megatron_pp_ext.cli import partition
from megatron_pp_ext.jobs import process


def test_a_run_that_fails_leaves_the_profile_that_was_there(mpp, tmp_path, monkeypatch):
    def fail(words, log):
        assert str(file) not in words
        log.write_text("much\nValueError: too small\n")
        return 7

    file = tmp_path / "gold.json"
    file.write_text("precious")
    monkeypatch.setattr(process, "run", fail)
    result = mpp("profile", file, "--", "--num-layers", 2)
    assert result.exit_code == 2
    assert "ended with status 7 and no profile: ValueError: too small" in result.stderr
    assert str(file.with_suffix(".log")) in result.stderr
    assert file.read_text() == "precious"


def test_what_a_profile_does_not_need_is_filled_in(tmp_path):
    """Megatron takes the last of a flag that is given twice, so the user's own stay as they are."""
    words = partition.training_flags(
        tmp_path / "a.json", ["--num-layers", "2", "--seq-length", "64", "--lr=3"]
    )
    for flag in ("--micro-batch-size", "--train-iters", "--eval-interval", "--mock-data", "--tokenizer-type"):
        assert flag in words
    assert "--lr" not in words
    assert words[words.index("--max-position-embeddings") + 1] == "64"


def test_a_profile_needs_a_folder(mpp, tmp_path):
    result = mpp("profile", tmp_path / "nowhere" / "x.json", "--", "--num-layers", 2)
    assert "no such folder; make it first" in result.stderr
