"""Finds the configuration to run: models of a step's time and memory, a search over them, and rehearsals.

The room is Python and numpy; nothing here imports torch or Megatron.
"""
