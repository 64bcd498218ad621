"""What the commands of ``mpp`` show of the feature."""
