"""The flags of the examples go through Megatron's own parser, patched as in the integration tests."""

from tests.megatron.conftest import short_search  # noqa: F401
