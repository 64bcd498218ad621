"""One file a family of schedules, each to be read beside the figure of its paper."""
