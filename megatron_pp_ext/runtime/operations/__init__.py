"""The operations of a rank in a step, one class each, which run themselves (``operation.Operation``)."""
