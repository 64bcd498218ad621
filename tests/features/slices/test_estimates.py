"""Estimates of steps in slices."""

import pytest

from megatron_pp_ext.costs import system as systems
from megatron_pp_ext.planner.step.estimate import Estimate, estimate_request
from tests.support.planner import asked_for
