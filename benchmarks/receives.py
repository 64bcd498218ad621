"""Are receives that the plan posts as fast over gloo as two that are always posted ahead?  (two CPU cores)

    python benchmarks/receives.py [--ranks 2,4,8] [--settings ...] [--repeats 3]

Two receives ahead in every channel, and sends without a bound, are what this project had before; they can
hang a GPU.  Both ways run every family in the same processes, one after the other within each repeat, on the
stages of benchmarks/runtime.py.  Writes results/receives.md.
"""

import os
import platform
import tempfile
from collections import deque
from datetime import date
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import typer
from bare import cores_awake
from rich.progress import track
from runtime import ALL_SETTINGS, Ranks, Repeats, Settings, Write, chosen, steps_of
from sleeping import Times
from systems import System, World, ours
from tables import publish, table

from megatron_pp_ext.runtime.channels import Channels
from megatron_pp_ext.runtime.plan import RankPlan
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.messages import Message

RESULTS = Path(__file__).parent / "results" / "receives.md"
AHEAD = 2
SLOWER = 0.01
"""The difference that counts, in predicted steps."""


class TwoAhead(Channels):
    """Posts ``AHEAD`` receives in every channel, wherever the plan has them, and never waits for a send."""

    def open(self, plan: RankPlan) -> None:
        """Learn what will be sent here and post the first receives."""
        arrivals = [arrival for step in plan.steps for arrival in step.receives]
        self._coming = {
            peer: iter([message for sender, message in arrivals if sender == peer])
            for peer in sorted({peer for peer, _ in arrivals})
        }
        self._ahead: dict[int, deque[Message]] = {peer: deque() for peer in self._coming}
        self._arrived: dict[Message, torch.Tensor] = {}
        for peer in self._coming:
            self._post_next(peer, AHEAD)

    def post(self, peer: int, message: Message) -> None:
        """Nothing: it is posted when the one ``AHEAD`` before it is waited for."""

    def receive(self, peer: int, message: Message) -> torch.Tensor:
        """The tensor of ``message``; those that were sent before it are kept for their turn."""
        while message not in self._arrived:
            first = self._ahead[peer].popleft()
            self._post_next(peer, 1)
            self._arrived[first] = super().receive(peer, first)
        return self._arrived.pop(message)

    def send(self, peer: int, tensor: torch.Tensor) -> None:
        """Start sending ``tensor`` and return at once."""
        self._send(peer, tensor.detach().contiguous())

    def _post_next(self, peer: int, count: int) -> None:
        for message in islice(self._coming[peer], count):
            super().post(peer, message)
            self._ahead[peer].append(message)


def two_ahead(world: World, plan: RankPlan, times: Times) -> Channels:
    """The channels of a step as this project had them before."""
    channels = world.channels(times, TwoAhead)
    channels.open(plan)
    return channels


SYSTEMS = [
    system
    for family in catalog.NAMES
    for system in (
        System(f"planned {family}", family, ours),
        System(f"two ahead {family}", family, partial(ours, open_channels=two_ahead)),
    )
]
"""Planned and two ahead in turn."""


def main(
    ranks: Ranks = "2,4,8", settings: Settings = ALL_SETTINGS, repeats: Repeats = 3, write: Write = True
) -> None:
    """Measure and write the table."""
    rows: list[tuple[object, ...]] = []
    slower = 0
    with tempfile.TemporaryDirectory() as folder, cores_awake():
        for count, setting in track(chosen(ranks, settings), "measuring"):
            taken = steps_of(SYSTEMS, count, setting, repeats, Path(folder))
            for planned, ahead in zip(taken[::2], taken[1::2], strict=True):
                difference = planned.ratio - ahead.ratio
                slower += difference > SLOWER
                ratios = (f"{planned.ratio:.3f}", f"{ahead.ratio:.3f}", f"{difference:+.3f}")
                rows.append((planned.system.family, setting, count, *ratios))
    head = ("family", "setting", "ranks", "planned", "two ahead", "difference")
    text = [
        "# Receives posted by plan, and two posted ahead",
        "",
        f"`python benchmarks/receives.py --ranks {ranks} --settings {settings!r} --repeats {repeats}` on "
        f"{platform.machine()}, {os.cpu_count()} cores, {date.today()}. Medians of {repeats} steps of each, "
        "alternating, over the predicted step; stages and settings are those of [runtime.md](runtime.md).",
        "",
        f"A planned step is slower by more than {SLOWER} of its prediction in {slower} of {len(rows)} rows.",
        "",
        table(head, rows),
    ]
    publish(text, RESULTS if write else None)


if __name__ == "__main__":
    typer.run(main)
