"""The actions that schedules consist of.

An action is one letter of work on one microbatch by one stage.  The letters F, I, W and B are
torch.distributed.pipelining's, so that this project, torch and torchtitan can exchange schedules as files
(``formats.csv_file``).  S and T are this project's own: where the head is split over the ranks
(``Placement.splits_head``), every rank does a part of it.
"""

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """The work of a stage on a microbatch."""

    F = "F"
    """Forward."""
    I = "I"
    """Input-gradient half of the backward; the papers call it B."""
    W = "W"
    """Weight-gradient half of the backward."""
    B = "B"
    """The whole backward, both halves in one."""
    S = "S"
    """A rank's part of the logits, with its part of their softmax and of the hidden state's gradient."""
    T = "T"
    """The weight gradient of a rank's part of the output layer."""


class Action(NamedTuple):
    """Work of one ``kind`` by ``stage`` on ``microbatch``; ``3F0`` is stage 3, forward, microbatch 0.

    S and T have the number of their rank's first stage, which is the rank's own number unless the placement
    has the embedding and the head on the last rank.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"
