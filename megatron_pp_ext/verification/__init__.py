"""Whether a schedule trains as stock's 1F1B does, with the user's flags on the user's machine.

``mpp verify`` is this package's command.  ``reference_runs`` states which runs are started.  ``verdict``
compares their records (``schedule.formats.run_record``), and states how far two may differ and why.
"""
