"""What is drawn: who trains and how it saves, when which rank is hit, and by what."""

import itertools
import random
import shlex
import signal
from collections.abc import Iterator
from dataclasses import dataclass

STEPS, SAVES_EVERY = 6, 2

JOB = shlex.split(
    "--untie-embeddings-and-output-weights "
    f"--train-iters {STEPS} --eval-interval {SAVES_EVERY} --eval-iters 1"
)


@dataclass(frozen=True)
class Runner:
    """The runner of the steps, by its flags.

    ``flushes`` tells whether a step leaves the pipeline empty, ``exits`` whether --exit-signal-handler is
    allowed, for which all ranks wait after each step, and ``copies`` whether activations wait on the host.
    """

    ranks: int
    flags: str
    replicas: int = 1
    batch: str = "--global-batch-size 4"
    flushes: bool = True
    exits: bool = True
    copies: bool = False

    @property
    def stages(self) -> int:
        """The ranks of one pipeline."""
        return self.ranks // self.replicas


SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"

RUNNERS = {
    "stock": Runner(3, ""),
    "stock, interleaved": Runner(2, "--num-virtual-stages-per-pipeline-rank 2"),
    "1f1b": Runner(3, "--pipeline-schedule 1f1b"),
    "zb-h1": Runner(3, "--pipeline-schedule zb-h1"),
    "zb-h1, ordered": Runner(3, "--pipeline-schedule zb-h1 --pipeline-order rule"),
    "v-half": Runner(2, "--pipeline-schedule v-half"),
    "v-half, host": Runner(2, "--pipeline-schedule v-half --pipeline-offload 0.5", copies=True),
    "v-zb, 2 replicas": Runner(4, f"--pipeline-schedule v-zb {SHARDED}", replicas=2),
    "profile-guided": Runner(2, "--pipeline-schedule v-half --pipeline-profile-steps 2-3"),
    "pipedream": Runner(
        3,
        "--pipeline-schedule pipedream --pipeline-update-interval 2 --pipeline-allow-waits",
        batch="--global-batch-size 2",
        flushes=False,
    ),
    "pipedream-2bw": Runner(
        2, "--pipeline-schedule pipedream-2bw", batch="--global-batch-size 2", flushes=False, exits=False
    ),
}

SAVES = {"sync": "", "async": "--async-save", "persistent": "--async-save --use-persistent-ckpt-worker"}

MOMENTS = ("step", "copy", "save", "evaluation")


@dataclass(frozen=True)
class Fault:
    """What hits the rank; ``ends`` tells whether that is the end of the job, which gets ``flags``."""

    signal: signal.Signals
    ends: bool = True
    flags: tuple[str, ...] = ()


FAULTS = {
    "killed": Fault(signal.SIGKILL),
    "terminated": Fault(signal.SIGTERM),
    "stopped": Fault(signal.SIGSTOP),
    # After a moment it goes on: nobody may notice.
    "paused": Fault(signal.SIGSTOP, ends=False),
    # Megatron saves after the step and all ranks exit.
    "asked to exit": Fault(signal.SIGTERM, ends=False, flags=("--exit-signal-handler",)),
}


@dataclass(frozen=True)
class Case:
    """``at`` is a part of the moment, from 0 to 1, which ``strike`` counts in calls of Python functions."""

    runner: str
    save: str
    moment: str
    fault: str
    victim: int
    at: float
    launcher: str = "forked"

    def __str__(self) -> str:
        where = f"rank {self.victim} {self.fault} at {self.at:.3f} of {self.moment}"
        return f"{self.runner}, {self.save} saves, {self.launcher}: {where}"


def drawn(seed: int) -> Iterator[Case]:
    """Draw cases without end: all combinations in a random order, then again in another one.

    One case in ten starts under torchrun, which takes longer than the rest of a case.
    """
    random_numbers = random.Random(seed)
    combinations = [
        (runner, *others)
        for runner, *others in itertools.product(RUNNERS, SAVES, MOMENTS, FAULTS)
        if RUNNERS[runner].exits or others[-1] != "asked to exit"
        if RUNNERS[runner].copies or others[1] != "copy"
    ]
    while True:
        for runner, save, moment, fault in random_numbers.sample(combinations, len(combinations)):
            yield Case(
                runner,
                save,
                moment,
                fault,
                victim=random_numbers.randrange(RUNNERS[runner].ranks),
                at=random_numbers.random(),
                launcher="torchrun" if random_numbers.random() < 0.1 else "forked",
            )
