"""What a launcher's child receives: writes ECHO_DIR/RANK.json with its arguments, its place and its description."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.config import to_plain
from recipes.launcher import rank_environment, split_arguments
from recipes.pretrain import compose

arguments = split_arguments(sys.argv[1:], os.environ)
ranks = rank_environment(os.environ)
seen = {"argv": sys.argv[1:], "overrides": arguments.overrides, "ranks": asdict(ranks)}
seen |= {"config": to_plain(compose(arguments.overrides)), "cwd": str(Path.cwd())}
Path(os.environ["ECHO_DIR"], f"{ranks.rank}.json").write_text(json.dumps(seen))
