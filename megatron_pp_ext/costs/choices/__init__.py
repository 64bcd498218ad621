"""What flags leave open and the costs of the model settle, such as the length of slices.

Whoever imports it gets what the features choose: they register here.
"""

import megatron_pp_ext.features.choices  # noqa: F401
