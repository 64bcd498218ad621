"""Keep the table of Megatron's commits that were tried, and try commits.

    python -m scripts.tried_commits table 'core 0.19.0=CHECKOUT' 'main=GITDIR@COMMIT'
    python -m scripts.tried_commits train CHECKOUT ...

``table`` reads the parameters in every place that a hook takes, without importing what it reads, and
replaces what ``megatron_pp_ext/megatron/signatures.json`` has of the named commits.  A name that is new
there is written into its ``commits`` by hand first.  ``train`` runs the tests of ``megatron_pp_ext.install``
on each checkout: small models train on two CPU ranks with it and without it, to the same bits.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_pp_ext.megatron import patching
from megatron_pp_ext.megatron.source_files import SourceFiles, parameters_in

ROOT = Path(__file__).parents[1]

Tables = dict[str, dict[str, str]]
"""The parameters by place, by the names of commits."""


class CommitFiles(SourceFiles):
    """The files of one commit of the git directory ``folder``, which need not be checked out."""

    def __init__(self, folder: Path, commit: str) -> None:
        super().__init__(folder)
        self._commit = commit

    def text(self, path: str) -> str | None:
        """See ``SourceFiles``."""
        show = ["git", "-C", str(self.folder), "show", f"{self._commit}:{path}"]
        result = subprocess.run(show, capture_output=True, text=True, check=False)
        return result.stdout if result.returncode == 0 else None


def files_of(place: str) -> SourceFiles:
    """Return the files of a checkout, or of ``GITDIR@COMMIT``."""
    folder, _, commit = place.partition("@")
    return CommitFiles(Path(folder), commit) if commit else SourceFiles(Path(folder))


def hooked_places() -> list[str]:
    """Return every place in which some Megatron or framework is hooked."""
    from megatron_pp_ext import cpu

    cpu.install()
    from megatron_pp_ext.megatron import frameworks, hooks

    every = (*hooks.all_hooks(cpu=True), *frameworks.HOOKS, *frameworks.LOGS)
    return [place.path for hook in every for place in hook.places]


def written(commits: Mapping[str, Any], tables: Tables) -> str:
    """Return the content of the file; a place with its parameters is a line."""
    having: dict[tuple[str, str], list[str]] = {}
    for name in commits:
        for place, parameters in tables[name].items():
            having.setdefault((place, parameters), []).append(name)
    megatrons = [name for name, row in commits.items() if patching.Commit(name, **row).is_megatron]
    rows = []
    for (place, parameters), names in sorted(having.items()):
        only = {} if names == megatrons else {"commits": names}
        rows.append(json.dumps({"place": place, "parameters": parameters, **only}))
    commit_rows = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in commits.items()]
    lines = (",\n  ".join(entries) for entries in (commit_rows, rows))
    return '{{\n "commits": {{\n  {}\n }},\n "places": [\n  {}\n ]\n}}\n'.format(*lines)


def _write(sources: Mapping[str, SourceFiles]) -> None:
    commits = json.loads(patching.FILE.read_text(encoding="utf-8"))["commits"]
    unknown = [name for name in sources if name not in commits]
    if unknown:
        raise SystemExit(
            f"{patching.FILE.name} has no commit {unknown[0]!r}: write it into its commits first"
        )
    tables: Tables = {name: dict(patching.signatures(name)) for name in commits}
    for name, source in sources.items():
        by_place = {place: parameters_in(source, place) for place in hooked_places()}
        tables[name] = {place: parameters for place, parameters in by_place.items() if parameters is not None}
    patching.FILE.write_text(written(commits, tables), encoding="utf-8")


def _train(checkout: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-n", "0", "-W", "ignore", "tests/megatron/test_install.py"]
    environment = {**os.environ, "MEGATRON_LM": str(Path(checkout).resolve())}
    return subprocess.run(command, check=False, cwd=ROOT, env=environment).returncode == 0


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("table").add_argument("sources", nargs="+", metavar="NAME=SOURCE")
    commands.add_parser("train").add_argument("checkouts", nargs="+", metavar="CHECKOUT")
    options = parser.parse_args()
    if options.what == "table":
        _write(
            {name: files_of(place) for name, _, place in (word.partition("=") for word in options.sources)}
        )
        return 0
    return 0 if all([_train(checkout) for checkout in options.checkouts]) else 1


if __name__ == "__main__":
    sys.exit(main())
