"""Names of schedules that are no entries of the catalogue.

They are the names that ``--pipeline-schedule`` accepts in addition to those of the entries, the names that
other projects give to the entries, and the names of schedules that are not offered here.
"""

from typing import NamedTuple

from megatron_pp_ext.schedule.abilities import Abilities

FORWARD_ONLY = "forward-only"
"""The order of an evaluation, whichever schedule trains; no flag requests it."""

NO_PIPELINE = "none"
"""The order of a single rank, which runs one microbatch after the other; no flag requests it."""

FLEX = "flex"
"""The schedule that is compiled for given costs and a memory limit."""

AUTO = "auto"
"""``FLEX`` within the memory that the devices have free, which only training can measure."""

CSV_PREFIX = "csv:"
"""The prefix of a schedule that is read from a file; the path follows it."""

PIPEDREAM, TWO_VERSIONS = "pipedream", "pipedream-2bw"
"""1F1B's order without an end: a stage updates its weights as its own backwards come in."""


class Other(NamedTuple):
    """A name outside the catalogue, in the words of the table that ``mpp list`` prints."""

    name: str
    summary: str
    placement: str
    chunks: str
    source: str
    abilities: Abilities


OTHERS = (
    Other(
        FLEX,
        "the shortest found for your costs within a memory limit",
        "any",
        "1 or more",
        "mpp schedule flex",
        Abilities(splits_backward=True, has_pairs=True, is_compiled=True, takes_limit=True),
    ),
    Other(
        AUTO,
        "flex, within the memory that the devices have free; in training only",
        "any",
        "1 or more",
        "",
        Abilities(splits_backward=True, is_compiled=True, measures_memory=True),
    ),
    Other(
        f"{CSV_PREFIX}FILE",
        "your own, from a file",
        "any",
        "1 or more",
        "mpp schedule NAME --csv FILE",
        Abilities(has_pairs=True),
    ),
    Other(
        PIPEDREAM,
        "1f1b that never flushes; an update every few microbatches; in training only",
        "linear",
        "1",
        "SOSP 2019, figure 4",
        Abilities(flushes=False, order="1f1b"),
    ),
    Other(
        TWO_VERSIONS,
        "the same with two weight versions at most; in training only",
        "linear",
        "1",
        "arXiv 2006.09503, section 3.1",
        Abilities(flushes=False, has_two_versions=True, order="1f1b"),
    ),
)
"""The names that ``--pipeline-schedule`` accepts in addition to those of the catalogue."""

ALIASES = {
    # arXiv 2401.10241 and its fork of Megatron-LM
    "zb1p": "zb-h1",
    "zb2p": "zb-h2",
    "zbv": "v-zb",
    # torch.distributed.pipelining
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "interleaved-zb",
    "loopedbfs": "breadth-first",
    "zbvzerobubble": "v-zb",
    "dualpipev": "dualpipe-v",
    # AMD Primus
    "1f1b-interleaved": "interleaved",
    "zero-bubble": "zb-h1",
    "zbv-formatted": "v-zb",
    "zbv-greedy-half": "v-half",
    "zbv-greedy-min": "v-min",
}
"""The names that other projects give to schedules of the catalogue."""

NOT_HERE = {
    FLEX: "it is compiled for costs and a memory limit, in Python by compile_schedule, and by mpp schedule "
    f"{FLEX} --memory-limit 0.5",
    AUTO: f"it is {FLEX} within the memory that the devices have free, which only training can measure; look "
    f"at {FLEX} with --memory-limit, and train with --pipeline-schedule {AUTO}",
    PIPEDREAM: "it runs 1f1b over the whole training without an end, so it has no makespan; look at 1f1b "
    "with many microbatches, let mpp estimate tell its pace, and train with --pipeline-schedule "
    f"{PIPEDREAM}",
    TWO_VERSIONS: f"it runs in the order of {PIPEDREAM}, which is 1f1b's; look at 1f1b with many "
    f"microbatches, and train with --pipeline-schedule {TWO_VERSIONS}",
    "seq1f1b": "it cuts the sequence into parts that depend on each other, which no order of "
    "microbatches can say; to save memory use v-half or v-min",
    "group-interleaved": "it orders 1f1b for copying activations to the host, which is not done here; "
    "to save memory use v-half or v-min",
}
"""Why the catalogue lacks schedules: they are compiled, need training, or are another project's."""
