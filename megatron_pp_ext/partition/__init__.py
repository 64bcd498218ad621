"""PipeDream's partitioner: where to cut a profiled model into stages, and how often each is there."""
