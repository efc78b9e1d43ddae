"""The first batch as the model sees it, for TensorBoard."""
