"""The search for the configuration that fits and takes the shortest step.

Whoever imports it gets what the features offer: they register here.
"""

import megatron_pp_ext.features.searches  # noqa: F401
