"""Which schedules a drawn job can run under, by names that say all about them.

A name is that of the catalogue, with a number of chunks where it is not the usual one ("interleaved 3");
"flex 0.75" with its limit, "auto", and "csv v 2": a random order of that placement.
"""

from collections.abc import Iterator
from random import Random

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.entry import AUTO, FLEX
from megatron_pp_ext.schedule.placement import Shape
from tests.hunt.fuzz.factors import Row
from tests.hunt.fuzz.job import CSV, CSV_ANY_ORDER, file_of

LIMITS = (0.4, 1.6)
"""Of ``flex``, as fractions of what 1F1B keeps; a limit that is too low for the job is refused."""


def drawn(row: Row, random: Random) -> list[str]:
    """The schedules that the job of ``row`` can run under, in a random order."""
    has_pairs = row["pairs"] != "none"
    names = [
        name for name in _of_catalogue(row) if catalog.abilities(name.split()[0]).has_pairs or not has_pairs
    ]
    # In pairs flex needs the costs of its stages, whose number another cut would change.
    if not has_pairs or (row["chunks"] != "1" and row["cut"] == "even"):
        for chunks in _compiled_chunks(row):
            names += [f"{FLEX} {random.uniform(*LIMITS):.3f}{chunks}" for _ in range(2)]
    if not has_pairs and not row["precision"].startswith("fp16") and row["chunks"] in "12":
        names.append(AUTO)
    # A file has no place for a shared vocabulary.
    if row["microbatches"] != "growing" and row["sharing"] == "none":
        placements = list(_placements(row))
        kinds = [CSV] if row["dropout"] == "on" else [CSV, CSV_ANY_ORDER]
        files = [f"{random.choice(kinds)} {random.choice(placements)}" for _ in range(3)]
        names += [name for name in files if not has_pairs or file_of(row, name).paired]
    names = list(dict.fromkeys(names))
    random.shuffle(names)
    return names


def _of_catalogue(row: Row) -> Iterator[str]:
    for entry in catalog.ENTRIES.values():
        for chunks in _chunks(row, entry.shape):
            if entry.accepts(chunks):
                yield entry.name if chunks == entry.chunks else f"{entry.name} {chunks}"


def _chunks(row: Row, shape: Shape) -> list[int]:
    """The stages that a rank may have in a placement of ``shape``."""
    most, cut = int(row["chunks"]), row["cut"]
    if cut == "layout":
        return [most]
    if cut in ("first", "last") and shape in (Shape.V, Shape.WAVE):
        return [1]
    return [chunks for chunks in range(1, most + 1) if most % chunks == 0]


def _compiled_chunks(row: Row) -> list[str]:
    """The stages of a rank as flex wants them given: it cuts in two by itself."""
    return [f" {row['chunks']}"] if row["chunks"] in "34" else [""]


def _placements(row: Row) -> Iterator[str]:
    for shape in Shape:
        for chunks in _chunks(row, shape):
            fits = {Shape.LINEAR: chunks == 1, Shape.V: chunks == 2, Shape.LOOP: chunks > 1}
            if fits.get(shape, chunks > 2):
                yield f"{shape} {chunks}"
