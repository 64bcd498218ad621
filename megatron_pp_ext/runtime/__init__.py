"""How one rank runs its actions.  Knows torch, but not Megatron."""
