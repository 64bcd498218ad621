"""The files that this package reads and writes, one reader and one writer for each kind.

Training, the planner, PipeDream and the tools exchange nothing but these files.
"""
