"""How one rank runs its actions.  It uses torch and ``schedule``, and nothing of Megatron."""
