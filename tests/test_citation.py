"""CITATION.cff names the papers of all schedules, and the version of the package."""

import re
from pathlib import Path

import pytest

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.version import VERSION

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

CITATION = yaml.safe_load((Path(__file__).parents[1] / "CITATION.cff").read_text(encoding="utf-8"))


def test_it_is_of_this_version() -> None:
    assert CITATION["version"] == VERSION


def test_the_papers_of_all_schedules_are_in_it() -> None:
    cited = {paper.get("url", "").rpartition("/")[2] for paper in CITATION["references"]}
    named = re.findall(r"arXiv (\d{4}\.\d{5})", " ".join(entry.paper for entry in catalog.ENTRIES.values()))
    assert len(set(named)) >= 5
    assert set(named) <= cited


def test_every_paper_has_what_a_bibliography_needs() -> None:
    for paper in CITATION["references"]:
        assert paper["title"]
        assert paper["authors"]
        assert 2018 <= paper["year"] <= 2026
        assert paper.get("url") or paper.get("doi")
