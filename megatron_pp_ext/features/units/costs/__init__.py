"""The costs of slices of a model's sequences, and the choice of their length."""
