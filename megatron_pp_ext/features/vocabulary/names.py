"""The values of --pipeline-vocabulary, beside ``schedule.names.AUTO``."""

SHARED = "shared"
"""Every rank has an equal part of the vocabulary."""
