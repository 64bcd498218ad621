"""Activations that wait on the host (arXiv 2503.01328)."""
