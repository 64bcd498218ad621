"""The families of schedules, one file each, to be read next to the figure of its paper."""
