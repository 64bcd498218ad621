"""Where the feature meets the planner."""
