"""The runners of training and evaluation steps, and what they have in common."""
