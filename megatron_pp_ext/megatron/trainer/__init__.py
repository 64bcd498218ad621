"""Hooks into megatron.training: its flags, its training loop, its logs and reports."""
