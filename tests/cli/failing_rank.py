"""A job of two ranks: rank 1 fails while rank 0 waits for it in a collective."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.launcher import rank_environment, run_guarded

ranks = rank_environment(os.environ)


def job() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if ranks.rank == 1:
        Path("failed").touch()
        raise ZeroDivisionError("step 3")
    dist.all_reduce(torch.ones(1))


sys.exit(run_guarded(job, ranks.rank))
