"""Schedules: what runs, in which order, on which rank.  Pure Python without torch and Megatron."""
