"""Defects of megatron-core, all of them for machines without CUDA."""
