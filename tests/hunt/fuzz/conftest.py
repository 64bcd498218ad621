"""Ranks here are forked from this process, as in tests/megatron."""

from tests.support import ranks  # noqa: F401  (the stand-ins for torch.cuda, before Megatron is imported)

# isort: split
from megatron_pp_ext.launch import install

install()
