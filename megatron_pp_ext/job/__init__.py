"""The request: the job, its readers, the pipeline that it requests, and the rules.  Pure Python.

Whoever imports it gets what the features add to it: they register here.
"""

import megatron_pp_ext.features  # noqa: F401
