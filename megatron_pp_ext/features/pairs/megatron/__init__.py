"""Where the feature meets Megatron."""
