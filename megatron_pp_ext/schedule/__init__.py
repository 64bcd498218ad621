"""What runs, in which order, on which rank.  Pure Python: knows neither torch nor Megatron."""
