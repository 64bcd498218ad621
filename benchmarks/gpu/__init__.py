"""What needs a GPU: parity over real devices, the cost of a split backward, rehearsals, gaps, memory."""
