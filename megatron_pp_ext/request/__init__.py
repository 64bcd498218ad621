"""What Megatron's flags ask of a pipeline, decided in one place.  Pure Python: neither torch nor Megatron."""
