"""Scripts that write documents and check releases."""
