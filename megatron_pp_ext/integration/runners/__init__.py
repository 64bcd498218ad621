"""Who runs the microbatches of a training step."""
