"""From Megatron's command line to a request for a pipeline, and the errors of both."""
