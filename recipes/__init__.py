"""Pretraining recipes for sparse language models: from one typed description to a training run."""
