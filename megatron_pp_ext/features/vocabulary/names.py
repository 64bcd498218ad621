"""The values of --pipeline-vocabulary, in addition to ``schedule.names.AUTO``."""

SHARED = "shared"
"""Every rank has an equal part of the vocabulary."""
