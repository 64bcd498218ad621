"""The measured peaks of memory against their estimates, and the margin that a search leaves."""

from megatron_pp_ext.job.typed_job import Job

_ABOVE, _ABOVE_OF_EXPERTS = 0.03, 0.09
"""The parts by which peaks of whole models were above their estimates at most, of those from 10 GB on that
Megatron-LM's functional tests record (benchmarks.planner.found_memory).  Experts do not get as many tokens
each: the peak that is 9% above its estimate was 2% below it after two iterations."""

HEADROOM, HEADROOM_OF_EXPERTS = 0.06, 0.10
"""The share of a device's memory that a search leaves free by default: as much as peaks may be above their
estimates, and some for buffers that no model counts: 3%, and 1% where there are experts."""


def above(job: Job) -> float:
    """Return the part by which a peak may be above its estimate."""
    return _ABOVE_OF_EXPERTS if job.model.num_experts else _ABOVE


def headroom(job: Job) -> float:
    """Return the share of a device's memory that a search for ``job`` leaves free by default."""
    return HEADROOM_OF_EXPERTS if job.model.num_experts else HEADROOM
