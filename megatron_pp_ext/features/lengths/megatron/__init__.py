"""Lengths in Megatron: data that is read ahead and ordered."""
