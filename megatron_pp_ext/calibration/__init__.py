"""Measures how fast a machine computes products, copies, and sends messages, for ``mpp calibrate``."""
