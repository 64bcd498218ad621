"""What a rank can do in a step: one class an operation, which runs itself (``operation.Operation``)."""
