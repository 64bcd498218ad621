"""What cannot be asked together: one table, which training and every command read before anything starts.

A refusal is one row in one file: what is asked, the releases that it concerns, the reason and the fix.
Values that cannot be read, and sizes that do not divide each other, are errors of whoever reads them.
"""
