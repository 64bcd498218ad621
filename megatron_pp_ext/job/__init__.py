"""The meaning of Megatron's flags for a pipeline.  Pure Python: neither torch nor Megatron."""
