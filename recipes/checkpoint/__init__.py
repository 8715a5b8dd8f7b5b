"""Canonical checkpoints: logical tensors in safetensors shards, JSON for the rest, nothing that must be unpickled."""
