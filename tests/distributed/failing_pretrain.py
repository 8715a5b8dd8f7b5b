"""The training entry with rank 1 raising at step 3, for launchers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.pretrain import main
from tests.distributed.faults import rank_one_raises

rank_one_raises()
sys.exit(main())
