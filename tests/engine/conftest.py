"""Transformer Engine's own layers on CPU ranks, if TRANSFORMER_ENGINE names a checkout of it.

In a process of their own (``pytest tests/engine``), since Megatron binds Transformer Engine, or its absence,
when it is imported.
"""

from tests.support import ranks  # noqa: F401  (the stand-ins for torch.cuda)
from tests.support.engine_checkout import install_named

if install_named():
    import megatron_pp_ext.launch

    megatron_pp_ext.launch.install()
