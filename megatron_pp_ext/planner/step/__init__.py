"""The seconds of one training step, and the memory of every rank.

Whoever imports it gets what the features add: they register here.
"""

import megatron_pp_ext.features.estimates  # noqa: F401
