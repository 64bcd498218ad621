"""How long one training step takes, and what every rank keeps."""
