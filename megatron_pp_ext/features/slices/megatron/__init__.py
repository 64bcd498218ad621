"""Slices of sequences in the steps of Megatron's models."""
