"""--pipeline-vocabulary: what is refused in one line, what auto chooses, and what the run says."""

import pytest

from megatron_pp_ext.request import vocabulary_flag
from megatron_pp_ext.request.pipeline import for_world
from tests.support.flags import parsed

SHARED = "--pipeline-vocabulary shared"
