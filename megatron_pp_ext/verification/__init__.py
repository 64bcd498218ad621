"""Whether a schedule trains as stock's 1F1B does, with the user's flags on the user's machine.

``mpp verify`` is this package's command.  ``reference_runs`` states which runs are started, ``tolerances``
how far two runs may differ and why, and ``verdict`` compares their records
(``schedule.formats.run_record``).
"""
