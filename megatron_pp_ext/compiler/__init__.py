"""The compiler: the best order for given costs and memory.  Pure Python on top of schedules alone."""
