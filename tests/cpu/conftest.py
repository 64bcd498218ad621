"""Tests here import Megatron: the stand-ins for torch.cuda go in before pytest imports them."""

from tests.support import ranks  # noqa: F401
