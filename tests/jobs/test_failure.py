"""Which line of a failed job's output is its reason, whatever stands before and between the lines."""

import pytest

from megatron_pp_ext.jobs.failure import reason

TORCHRUN = """W1125 17:43:41 55 torch/distributed/elastic/multiprocessing/api.py:1028] closing process 9
E1125 17:43:41 55 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: CODE) local_rank: 1
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
traceback : Signal 15 (SIGTERM) received by PID 9
"""

WARNED = """/a/hooks.py:12: UserWarning: loss went up: Error: no step
  warnings.warn(f"loss went up: {why}")
"""

CRASH = """Traceback (most recent call last):
  File "a.py", line 5, in <module>
    send(losses)
RuntimeError: view(): cannot view shape
"""

LEFT_ALONE = """Traceback (most recent call last):
  File "a.py", line 6, in <module>
    work.wait()
RuntimeError: [gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:5539.
"""

BARE = """Traceback (most recent call last):
  File "a.py", line 5, in <module>
    assert size == 1
           ^^^^^^^^^
AssertionError
"""


def by(rank: str, text: str) -> str:
    return "".join(rank + line for line in text.splitlines(keepends=True))


def of(rank: int, form: str) -> str:
    return form.replace("N", str(rank))


@pytest.mark.parametrize("label", ["", "N: ", "0N: "], ids=["plain", "srun", "padded"])
@pytest.mark.parametrize("teed", ["", "[defaultN]:", "[r12_N]:"], ids=["plain", "tee", "role"])
@pytest.mark.parametrize("hook", ["", "[rankN]: "], ids=["plain", "hook"])
@pytest.mark.parametrize("text", [CRASH, BARE], ids=["message", "bare"])
def test_what_names_the_rank_hides_nothing(label: str, teed: str, hook: str, text: str) -> None:
    """The hook names a rank in front of tracebacks alone, the others in front of every line."""
    outer = label + teed
    whole = outer + hook
    output = by(of(0, outer), WARNED) + by(of(1, outer), WARNED)
    output += by(of(1, whole), text) + by(of(0, outer), WARNED)
    output += by(of(0, whole), LEFT_ALONE) + by(of(0, label), TORCHRUN.replace("CODE", "1"))
    expected = (
        "RuntimeError: view(): cannot view shape" if text is CRASH else "assert size == 1: AssertionError"
    )
    assert reason(output) == expected
    assert reason(output.replace("exitcode: 1", "exitcode: -9")).startswith("a rank was killed")


def test_a_rank_s_bare_error_is_explained_by_its_own_line() -> None:
    """Ranks write at the same time."""
    ranks = [by(f"[rank{rank}]: ", BARE.replace("size", f"size_{rank}")).splitlines() for rank in (0, 1)]
    for order in (ranks, ranks[::-1]):
        last = 1 if order is ranks else 0
        output = "\n".join(line for together in zip(*order, strict=True) for line in together)
        assert reason(output) == f"assert size_{last} == 1: AssertionError"


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94",
        "megatron.core.dist_checkpointing.core.CheckpointingException: no such checkpoint",
        "what():  [PG ID 0 Rank 0] Watchdog caught collective operation timeout",
        "pretrain_gpt.py: error: argument --lr: expected one argument",
        "megatron_pp_ext: no",
        "slurmstepd: error: *** JOB 7 ON node1 CANCELLED DUE TO TIME LIMIT ***",
        "srun: error: Unable to create step for job 7: Invalid number of tasks",
    ],
)
def test_every_kind_of_error_is_one(line: str) -> None:
    noise = by("[rank0]:", "[W1125 17:43:41 ProcessGroupNCCL.cpp:1538] Warning: not destroyed: error: none\n")
    noise += "WARNING:megatron.core.utils: error: none\n"
    before = "KeyError: 'a'\n\nDuring handling of the above\n"
    assert reason(f"{before}3: [rank3]: {line}\n3: bye\n{WARNED}{noise}") == line


def test_what_follows_from_the_end_of_another_rank_is_said_where_nothing_else_is() -> None:
    exited = "srun: error: node1: task 1: Exited with exit code 1\n"
    assert reason(by("0: [rank0]: ", LEFT_ALONE) + "training\n").startswith("RuntimeError: [gloo")
    assert reason(by("1: [rank1]: ", CRASH) + exited) == "RuntimeError: view(): cannot view shape"
    assert reason("training\n" + exited) == exited.strip()


@pytest.mark.parametrize("last", [WARNED, "WARNING: slow\n", TORCHRUN.splitlines(keepends=True)[0]])
def test_a_warning_is_never_the_reason(last: str) -> None:
    assert reason(f"no space left on the disk\n{last}") == "no space left on the disk"
    assert reason(last) == "it printed nothing"


def test_a_rank_that_lost_another_one_is_not_the_reason() -> None:
    lost = (
        "megatron_pp_ext: rank 1 has ended, or does not answer, while rank 0 was waiting for the gradient of "
        "microbatch 3 from stage 1 (it is gone); see what that rank printed, and go on from a checkpoint"
    )
    assert reason(f"[rank1]: ValueError: a sample is damaged\n{lost}\n") == "ValueError: a sample is damaged"
    assert reason(f"{lost}\n") == lost
