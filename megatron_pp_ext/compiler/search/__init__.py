"""The compiler's search for schedules: integers and lists inside, ``Schedule`` and ``Costs`` outside."""
