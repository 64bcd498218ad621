"""How long one training step takes, and what every rank keeps.

Whoever imports it gets what the features add: they register here.
"""

import megatron_pp_ext.features.estimates  # noqa: F401
