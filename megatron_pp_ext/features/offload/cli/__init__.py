"""The feature's part in the output of ``mpp``."""
