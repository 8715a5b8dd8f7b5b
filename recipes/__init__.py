"""Pretraining recipes for sparse language models: from one typed description to a training run."""

import warnings

# Said on every import and rank, about things that are upstream's: optional CUDA libraries that environment.json records,
# and names that DeepSpeed still uses.
for _message in (
    r"(Transformer Engine and )?Apex (is|are) not installed",
    r"full scope is deprecated",
    r".*all_gather_into_tensor",
    r".*reduce_scatter_tensor",
):
    warnings.filterwarnings("ignore", message=_message)
