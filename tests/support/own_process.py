"""Runs a program of ``tests.support`` in a process of its own, and reads the results of its ranks.

Importing ``megatron.core`` takes longer than most of the programs.  So one process imports it, and each
program runs in a fork of that one, in which no hook of this package is installed and ``megatron.training`` is
not imported.
"""

import atexit
import functools
import gc
import json
import os
import pickle
import runpy
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]


def found(program: str, folder: Path, *words: str) -> list[dict[Any, Any]]:
    """Return what each rank of ``tests.support.PROGRAM`` writes to a file in ``folder``, its first word.

    MEGATRON_LM may name a checkout to run on.
    """
    file, output = folder / "found.pickle", folder / "output"
    server = _server()
    request = f"tests.support.{program}", (str(file), *words), str(output), dict(os.environ)
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    status = server.stdout.readline().strip()
    assert status == "0", output.read_text(errors="replace")[-4000:] if output.exists() else status
    ranks: list[dict[Any, Any]] = pickle.loads(file.read_bytes())
    return ranks


@functools.cache
def _server() -> "subprocess.Popen[str]":
    """Start the process that imports ``megatron.core``; it ends with this one."""
    folders = filter(None, (os.environ.get("MEGATRON_LM"), str(ROOT)))
    server = subprocess.Popen(
        [sys.executable, "-m", __name__],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)
    return server


def serve() -> None:
    """Run each program that a line of stdin requests, and write its exit status."""
    from tests.support import ranks  # noqa: I001  (the stand-ins come before Megatron)
    from tests.support import own_loop  # noqa: F401

    ranks.import_ahead(*ranks.ROOMS)
    gc.freeze()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _be_program(*json.loads(line))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _be_program(program: str, words: Sequence[str], output: str, environment: Mapping[str, str]) -> NoReturn:
    """Run ``program`` with its output in a file, and end the process."""
    status = 1
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(environment)
        sys.argv = [program, *words]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
