"""What takes the place of Megatron's own functions, beside the step itself."""
