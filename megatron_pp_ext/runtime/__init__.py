"""How one rank runs its actions.  This package uses torch and ``schedule``, and nothing of Megatron.

Whoever imports it gets the features' additions to plans: they register here.
"""

import megatron_pp_ext.features.operations  # noqa: F401
