"""What a rank does at run time."""

import megatron_pp_ext.runtime  # noqa: F401  (which registers all features, and so comes before any of them)
