"""What has to hold before any test imports torch. Torch itself is left to the tests that need it."""

import os

# Ranks share the cores of the test machine. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
