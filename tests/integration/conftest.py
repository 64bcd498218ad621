"""Tests here patch Megatron: in this process once, so that every forked rank finds it patched.

Without --pipeline-schedule the patches must change nothing; ``test_seams`` holds them to it.
"""

from megatron_pp_ext.integration import install
from tests.support import ranks  # noqa: F401  (the stand-ins for torch.cuda, before Megatron is imported)

install()
