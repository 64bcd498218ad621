"""The compiler: the best order for given costs and memory, and the maker of every schedule.

Pure Python on top of schedules alone.  Whoever imports it gets what the features add: they register here.
"""

import megatron_pp_ext.features  # noqa: F401
