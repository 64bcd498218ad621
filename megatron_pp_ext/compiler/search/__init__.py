"""How the compiler finds schedules: integers and lists inside, ``Schedule`` and ``Costs`` outside."""
