"""A vocabulary that all ranks share (arXiv 2411.05288)."""
