"""What it takes to train a model: the seconds and bytes of its layers, a file a kind, and of its stages."""
