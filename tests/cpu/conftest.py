"""Tests here import Megatron: the stand-ins for torch.cuda go in before pytest imports them."""

import ranks  # noqa: F401
