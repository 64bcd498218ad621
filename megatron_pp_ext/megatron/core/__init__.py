"""Hooks into megatron.core: placement, linear layers, data parallelism, optimizers, recording.

Nothing here imports megatron.training, so that a trainer of another make can use all of it.
"""
