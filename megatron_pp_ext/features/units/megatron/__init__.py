"""Units in the steps of Megatron's models."""
