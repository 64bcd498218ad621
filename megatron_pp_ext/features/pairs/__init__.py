"""A forward and a backward of a rank that run together, each computing while the other communicates."""
