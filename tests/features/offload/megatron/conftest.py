"""Tests here patch Megatron, as those of tests/integration do."""

from tests.integration.conftest import said_by, short_search

__all__ = ["said_by", "short_search"]
