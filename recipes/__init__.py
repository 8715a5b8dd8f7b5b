"""Pretraining recipes for sparse language models: from one typed description to a training run."""

import warnings

# megatron-core says on every import that optional CUDA libraries are missing; environment.json records what is there.
warnings.filterwarnings(
    "ignore", message=r"(Transformer Engine and )?Apex (is|are) not installed|full scope is deprecated"
)
warnings.filterwarnings("ignore", message=r"Transformer Engine and Apex are not installed")
