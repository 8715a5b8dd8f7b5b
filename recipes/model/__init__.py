"""Transformer models assembled from megatron-core blocks."""
