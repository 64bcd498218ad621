"""Flags whose value is chosen by the costs of the model, such as the length of slices.

An import of this package imports the features' choices: they register here.
"""

import megatron_pp_ext.features.choices  # noqa: F401
