"""How one rank runs its actions.  This room uses torch and ``schedule``, and nothing of Megatron.

Whoever imports it gets what the features add to plans: they register here.
"""

import megatron_pp_ext.features.operations  # noqa: F401
