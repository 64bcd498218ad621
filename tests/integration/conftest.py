"""Tests here patch Megatron: in this process once, so that every forked rank finds it patched.

Without --pipeline-schedule the patches must change nothing; ``test_seams`` holds them to it.
"""

import sys
from pathlib import Path

import ranks  # noqa: F401  (the stand-ins for torch.cuda, before Megatron is imported)

from megatron_pp_ext.integration import install

install()
sys.path.append(str(Path(__file__).parent.parent / "launches"))  # the model of launch queues
