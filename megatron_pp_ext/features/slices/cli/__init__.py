"""What the commands show of slices."""
