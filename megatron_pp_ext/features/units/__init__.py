"""Steps whose units differ: in which order microbatches run, and how sequences are cut into slices."""
