"""Whether a schedule trains as stock's 1F1B does, with the user's flags on the user's machine.

``mpp verify`` is this room's command.  ``reference_runs`` says which runs are started, ``run_record`` is what
they write down, ``tolerances`` says how far two runs may differ and why, and ``verdict`` compares them.
"""
