"""The search for the configuration that fits and takes the shortest step."""
