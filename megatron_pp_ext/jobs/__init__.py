"""Starting training runs and telling why one failed: for commands, benchmarks and the demo alike."""
