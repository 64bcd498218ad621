"""What is asked: the job, its readers, the pipeline that it requests, and what cannot be.  Pure Python.

Whoever imports it gets what the features add to it: they register here.
"""

import megatron_pp_ext.features  # noqa: F401
