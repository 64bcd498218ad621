"""Benchmarks: each file answers one question, writes one page into results/ and runs as a module.

    python -m benchmarks.FOLDER.FILE --help

``schedules`` needs one core; ``runtime`` and ``planner`` compare runs on two CPU cores; ``gpu`` needs a GPU.
``--out FILE`` writes a page elsewhere, and ``--out -`` prints it.
"""
