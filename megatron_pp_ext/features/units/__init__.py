"""Steps whose units differ: in which order microbatches run, and how sequences are cut into slices.

Slices as units of a schedule are those of Seq1F1B (arXiv 2406.03488) and SlimPipe (arXiv 2504.14519).
"""
