"""Transformer Engine's own layers on CPU ranks, if TRANSFORMER_ENGINE names a checkout of it.

In a process of their own (``pytest tests/engine``), since Megatron binds Transformer Engine, or its absence,
when it is imported.
"""

import os
import sys
from pathlib import Path

if "TRANSFORMER_ENGINE" in os.environ and "megatron.core" not in sys.modules:
    from tests.support import graph_stub, ranks  # noqa: F401  (the stand-ins for torch.cuda)
    from tests.support.engine_checkout import install

    graph_stub.install()
    install(Path(os.environ["TRANSFORMER_ENGINE"]))

    import megatron_pp_ext.launch

    megatron_pp_ext.launch.install()
