"""The costs of training: seconds and bytes of layers and of stages, and descriptions of machines."""
