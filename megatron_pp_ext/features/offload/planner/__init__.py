"""Where the feature meets the planner."""

# These register all features, and so come before any of them.
import megatron_pp_ext.planner.search
import megatron_pp_ext.planner.step  # noqa: F401
