"""How one rank runs its actions.  This room uses torch and ``schedule``, and nothing of Megatron."""
