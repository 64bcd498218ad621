"""PipeDream: training without a flush, profiles of layers, and the partitioner that cuts a model by them."""
