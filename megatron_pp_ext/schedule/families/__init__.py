"""The families of schedules, one file each, to be read beside the figure of its paper."""
