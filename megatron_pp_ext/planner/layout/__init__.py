"""The cut of a model's layers into pipeline stages of unequal numbers of layers."""
