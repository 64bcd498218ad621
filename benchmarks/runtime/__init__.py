"""How fast are the executor, its parts and whole training steps?  Everything here needs two CPU cores."""
