"""Tests here patch Megatron, as those of ``tests/megatron`` do."""

from tests.megatron.conftest import said_by, short_search  # noqa: F401
