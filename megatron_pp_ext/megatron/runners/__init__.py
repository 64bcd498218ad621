"""The runners of training and evaluation steps, and their common parts."""
