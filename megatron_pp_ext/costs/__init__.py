"""The costs of training: seconds and bytes of layers, a file for each kind, and of stages."""
