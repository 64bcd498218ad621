"""Slices of sequences as the units of a schedule (Seq1F1B, arXiv 2406.03488; SlimPipe, arXiv 2504.14519)."""
