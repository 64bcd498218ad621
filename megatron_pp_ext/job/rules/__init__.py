"""What cannot be combined: one table, which training and every command read before anything starts.

A refusal is one row in one file: the flag, when it is refused, the reason, the fix and the releases that it
concerns.  Values that cannot be read, and sizes that do not divide each other, are errors of whoever reads
them.
"""
