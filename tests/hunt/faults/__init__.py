"""Ranks that are killed, stopped or terminated: ``python -m tests.hunt.faults`` draws when, where and how.

``cases`` has what is drawn. ``strike`` makes a rank hit itself, ``jobs`` runs the ranks and says how each
ended, and ``trial`` compares what comes of it with the runs of ``trained``, which nobody hit.
"""
