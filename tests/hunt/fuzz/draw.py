"""Draws jobs at random, the same ones for the same seed on every machine."""

from functools import cache
from random import Random

from megatron_pp_ext.schedule.entry import AUTO, FLEX
from megatron_pp_ext.verification.reference_runs import SCHEDULE_FLAGS
from tests.hunt.fuzz.factors import FACTORS, FLAGS, WITHOUT_GRAPHS, Row, is_legal, levels
from tests.hunt.fuzz.job import GRAPHS, STOCK, has_checkpoint, is_cut, may_capture
from tests.hunt.fuzz.schedules import drawn
from tests.support import engine_checkout
from tests.support.training import has_flag

TOGETHER = 4
"""Cases in a row that are one job under several schedules, and share the run of stock."""

_EVEN = ("pipeline", "microbatches")
"""Factors whose levels are drawn equally often."""

_PLAIN = 0.6
"""How often another factor is plain, so that of thirty a dozen are not."""

_SELDOM = {"pairs": 0.85}
"""How often those are plain that leave others little choice."""


def draw(seed: int, number: int) -> Row:
    """Return case ``number`` of ``seed``, counted from 0: a level for each factor, and a schedule.

    Beside the factors, a row has a ``seed`` for what else is random in it, its ``schedule``, how that is
    measured (``measures``), the schedule under which it goes on from a checkpoint (``resume``), the share
    of activations that waits on the host (``host``), how its microbatches, which are read ahead then, are
    ordered (``order``), the tokens of slices of its sequences (``slices``), whether samples state the
    documents in them, so that microbatches are of unlike length (``documents``), and the CUDA graphs of its
    layers (``graphs``), which every job has where Transformer Engine is that of a checkout.
    """
    random = Random(f"{seed} {number // TOGETHER}")
    row = _job(random)
    names = drawn(row, random)
    schedule = names[number % TOGETHER % len(names)]
    own = Random(f"{seed} {number} {schedule}")
    measures = own.choice(["none", "none", "none", "trace", "profile"])
    unmeasured = schedule.startswith("csv") or row["sharing"] != "none" or row["pairs"] != "none"
    if measures == "profile" and unmeasured:
        measures = "trace"
    resume = own.choice([STOCK, *names]) if has_checkpoint(row) else "none"
    host = "none" if measures == "profile" else own.choice(["none", "none", "0.5", "1"])
    order = own.choice(["none", "none", "rule", "search"])
    draws_by_order = row["dropout"] == "on" and row["data"] != "mock"
    if draws_by_order or (schedule.split()[0] in (AUTO, FLEX) and not _has_one_order(row, host)):
        order = "none"
    whole = {
        **row,
        "schedule": schedule,
        "measures": measures,
        "resume": resume,
        "host": host,
        "order": order,
    }
    if engine_checkout.is_installed():
        kinds = [kind for kind in GRAPHS if may_capture(whole, kind)]
        graphs = Random(f"{seed} {number} {schedule} graphs").choice(kinds)
        alone = dict.fromkeys(("host", "order", "slices", "documents"), "none")
        return {**whole, **alone, "graphs": graphs}
    whole["graphs"] = "none"
    slices = Random(f"{seed} {number} {schedule} slices").choice(["none", "4", "8", "16"])
    if slices == "none" or not is_cut(whole):
        has_documents = order != "none" and row["data"] != "mock"
        return {**whole, "slices": "none", "documents": "told" if has_documents else "none"}
    return {**whole, "host": "none", "slices": slices, "documents": "none"}


def _has_one_order(row: dict[str, str], host: str) -> bool:
    """Whether ``flex`` and ``auto`` may order microbatches of the job."""
    alone = row["sharing"] == row["pairs"] == host == "none"
    return alone and "ep" not in row["parallel"]


def plain(**choices: str) -> Row:
    """Return the row of the plainest job under V-Half, but for ``choices``."""
    own = dict.fromkeys(("measures", "resume", "host", "order", "slices", "documents", "graphs"), "none")
    none = {"seed": "1", "schedule": "v-half", **own}
    return {**none, **{factor: levels(factor)[0] for factor in FACTORS}, **choices}


def _job(random: Random) -> dict[str, str]:
    row = {"seed": str(random.randrange(10**6))}
    for factor in FACTORS:
        legal = [
            level
            for level in levels(factor)
            if is_legal({**row, factor: level}, factor) and _is_known(factor, level)
        ]
        plain = levels(factor)[0]
        others = [level for level in legal if level != plain]
        share = 1 / len(legal) if factor in _EVEN else _SELDOM.get(factor, _PLAIN)
        stays = plain in legal and (not others or random.random() < share)
        row[factor] = plain if stays else random.choice(others)
    return row


@cache
def _is_known(factor: str, level: str) -> bool:
    """Whether this release of Megatron, or the plugin, has the flags of a level."""
    if engine_checkout.is_installed() and level in WITHOUT_GRAPHS.get(factor, "").split():
        return False
    words = FLAGS.get(factor, {}).get(level, "").split()
    return all(word in SCHEDULE_FLAGS or has_flag(word) for word in words if word.startswith("--"))
