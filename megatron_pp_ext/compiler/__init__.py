"""The best order for given costs and memory.  Pure Python: knows the schedules and nothing else."""
