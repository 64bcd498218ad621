"""Flags whose value is chosen by the costs of the model, such as the length of slices.

Whoever imports it gets what the features choose: they register here.
"""

import megatron_pp_ext.features.choices  # noqa: F401
