"""The hooks that ``seams`` puts in the place of Megatron's functions, except the step itself."""
