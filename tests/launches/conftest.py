"""Random schedules are made where schedules are tested."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "schedule"))
