"""Published numbers, each with its source: what tests and benchmarks compare with."""
