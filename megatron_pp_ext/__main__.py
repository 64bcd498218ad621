"""Run any Megatron-LM training script with the schedules installed.

    torchrun --nproc-per-node 4 -m megatron_pp_ext [--cpu] SCRIPT.py ARGS...

The script stays as it is. Before it starts, its folder goes first on the module search path, so that a
Megatron-LM checkout wins over an installed megatron-core; then Megatron is imported and its hooks are
replaced. From there on the script runs as if it had been started by itself.
"""

import os
import runpy
import signal
import sys
from collections.abc import Sequence

from megatron_pp_ext.activation import refuse_with_flags
from megatron_pp_ext.launch_errors import PREFIX, in_one_line

USAGE = "usage: python -m megatron_pp_ext [--cpu] SCRIPT.py ARGS..."
HELP = f"""{USAGE}

Runs a Megatron-LM training script with this package's pipeline schedules installed, for example

    torchrun --nproc-per-node 8 -m megatron_pp_ext pretrain_gpt.py --pipeline-schedule v-half ...

  --cpu     run on CPUs with gloo: put stubs of torch.cuda in place and add the flags that a CPU needs
  --help    show this text; --help after SCRIPT.py shows the flags of the script
"""


def prepare(cpu: bool = False) -> None:
    """Install the schedules into Megatron, and before that, on a CPU, the stubs of torch.cuda.

    This has to run before anything imports Megatron. It takes ``--cpu`` out of sys.argv, and puts the flags
    that a CPU needs in.  ValueError where the environment asks for a schedule as well.
    """
    refuse_with_flags()
    # A script in this package's own folder puts that folder first, whose ``megatron`` would hide Megatron.
    own = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder) != own]
    if {"--exit-signal-handler", "SIGINT"} <= set(sys.argv[1:]):
        # Training takes this signal over, and saves. Before that there is nothing to save, and no traceback
        # of whatever was being imported helps.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    while "--cpu" in sys.argv[1:]:
        cpu = True
        sys.argv.remove("--cpu")
    if os.environ.get("RANK", "0") == "0":
        print("megatron_pp_ext imports torch and Megatron: 10 to 60 seconds", file=sys.stderr, flush=True)
    if cpu:
        from megatron_pp_ext import cpu as stubs

        stubs.install()

    from megatron_pp_ext.launch import install

    install(cpu)
    if cpu:
        sys.argv[1:] = stubs.with_cpu_flags(sys.argv[1:])
        stubs.fork_checkpoint_writers(sys.argv[1:])


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line, prepare Megatron and run the script."""
    words = list(sys.argv[1:] if argv is None else argv)
    cpu = False
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option in ("-h", "--help"):
            print(HELP, end="")
            return
        if option != "--cpu":
            _fail(f"unknown option {option}; options of the training script go after SCRIPT.py")
        cpu = True
    if not words:
        _fail("no training script given")
    script, *arguments = words
    if os.path.isdir(script):
        _fail(f"{script} is a folder; give the training script in it, such as {script}/pretrain_gpt.py")
    if not os.path.isfile(script):
        _fail(f"{script} does not exist; give the path of a Megatron-LM training script")

    # "python SCRIPT.py" puts the script's folder first. With -m the first entry is the current folder, and a
    # folder called megatron there would win over the script's own.
    if not sys.flags.safe_path:
        sys.path.pop(0)
    sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    sys.argv = [script, *arguments]
    with in_one_line():
        prepare(cpu)
        runpy.run_path(script, run_name="__main__")


def _fail(problem: str) -> None:
    """End with one line that describes the problem, and the status of a usage error."""
    with in_one_line():
        raise SystemExit(f"{PREFIX}{problem} ({USAGE})")


if __name__ == "__main__":
    main()
