"""Starting training runs and reporting why one failed, for commands, benchmarks and the demo alike."""
