"""Workarounds of Megatron's own defects, which any schedule meets, stock's among them: one file each."""
