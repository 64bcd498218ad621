"""PipeDream's partitioner: where to cut a profiled model into stages, and how many replicas each one gets."""
