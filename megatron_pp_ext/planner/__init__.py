"""Finds the configuration to run: models of a step's time and memory, a search over them, and rehearsals.

The package needs Python and numpy alone; nothing in it imports torch or Megatron.
"""
