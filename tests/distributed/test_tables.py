"""What each rank works out for itself agrees with what the others do: owners, parameters, optimizer groups, samples."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from recipes import groups, placement
from recipes.config import Config
from recipes.data.dataset import load_dataset
from recipes.data.loader import step_indices
from recipes.data.synthetic import write_dataset
from recipes.engine import make_engine
from recipes.engine.state import full_shape
from recipes.launcher import rank_environment
from recipes.model.gpt import GPT, registry
from recipes.topology import Role, layout_of
from recipes.train.job import check_same_data, start_process
from tests.tiny import change, tiny_config, tiny_moe_config

pytestmark = pytest.mark.distributed
HERE = "tests.distributed.test_tables"

TP2 = {"parallel__tensor_model_parallel_size": 2}
TP4 = {"parallel__tensor_model_parallel_size": 4, "model__num_query_groups": 4}
PP2 = {"parallel__pipeline_model_parallel_size": 2}
EP2, EP4 = ({"parallel__expert_model_parallel_size": size} for size in (2, 4))
ETP1, ETP2 = ({"parallel__expert_tensor_parallel_size": size} for size in (1, 2))
# Padding on the last rank alone, on whole ranks, nowhere.
VOCABULARIES = [(61, 16), (60, 128), (64, 16)]


def configs() -> list[Config]:
    """Layouts with padding of each sort, tied and untied in turn."""
    dense = [TP2, TP2, TP4, PP2, PP2 | TP2]
    experts = [TP2 | EP2 | ETP1, TP2 | EP2 | ETP2, EP4, PP2 | EP2]
    layouts = [(tiny_config, changes) for changes in dense] + [(tiny_moe_config, changes) for changes in experts]
    found = []
    for number, ((make, changes), vocabulary) in enumerate(zip(layouts, itertools.cycle(VOCABULARIES), strict=False)):
        config = change(make(zero__stage=1, train__micro_batch_size=2), changes)
        config.model.vocab_size, config.model.make_vocab_size_divisible_by = vocabulary
        config.model.share_embeddings_and_output_weights = number % 2 == 0
        found.append(config)
    return found


def tables(rank: int, world_size: int, configs: list[Config]) -> list[dict[str, Any]]:
    """Of each layout what this rank has worked out."""
    start_process(configs[0], rank_environment(os.environ))
    found = []
    for config in configs:
        groups.leave()
        layout = layout_of(config, world_size)
        model = GPT(config, layout)
        entries = registry(model, config)
        engine = make_engine(model, entries, config)
        keys = ("name", "lr_scale", "weight_decay", "copies", "tied")
        found.append(
            {
                "owners": placement.digest(placement.owners(config, layout)),
                "held": {(piece.name, piece.offsets, piece.shape) for entry in entries for piece in entry.pieces},
                "parameters": [
                    (e.name, tuple(full_shape(e.parameter)), e.sharded, e.tied, e.weight_decay) for e in entries
                ],
                "groups": [[group[key] for key in keys] for group in engine.optimizer.param_groups],
                "copies": engine._copies,
                "samples": step_indices(
                    0, config.train.micro_batch_size, engine.accumulation_steps,
                    layout.index(Role.dp, rank), layout.data_parallel_size,
                ).tolist(),
            }
        )  # fmt: skip
        engine.close()
    return found


def test_ranks_agree_on_every_table(run_ranks):
    asked = configs()
    ranks = run_ranks(f"{HERE}:tables", 4, asked)
    for number, config in enumerate(asked):
        found, layout = [rank[number] for rank in ranks], layout_of(config, 4)
        assert len({table["owners"] for table in found}) == 1
        held = placement.held_boxes(config, layout)
        for rank, table in enumerate(found):
            assert table["held"] == {(box.name, box.offsets, box.shape) for box in held if rank in box.ranks}
        for stage in layout.stages():
            first, *others = (found[rank] for rank in stage)
            for name in ("parameters", "groups", "copies"):
                assert all(other[name] == first[name] for other in others), (name, layout)
        for place in range(layout.data_parallel_size):
            same = [found[rank]["samples"] for rank in range(4) if layout.index(Role.dp, rank) == place]
            assert all(samples == same[0] for samples in same)
        read = [row for rank in layout.group_of(Role.dp, 0) for micro in found[rank]["samples"] for row in micro]
        assert sorted(read) == list(range(config.train.global_batch_size))
        copies = {box.name: len(box.ranks) for box in held}
        for rank, table in enumerate(found):  # how often the gradient norm counts a parameter
            of_parameter = {name: count for name, count in table["copies"].items() if name.startswith("embedding")}
            assert set(of_parameter.values()) <= {copies["embedding.weight"]}, (rank, layout)


def opened(rank: int, world_size: int, folders: list[Path]) -> str:
    """What a rank is told when each opens its own data folder."""
    start_process(tiny_config(), rank_environment(os.environ))
    try:
        check_same_data(load_dataset(folders[rank]))
    except ValueError as error:
        return str(error)
    return "the same"


def test_ranks_that_find_different_data_all_stop(run_ranks, tmp_path):
    """As on nodes with disks of their own: a copy elsewhere is the same data, one more document in one domain is not."""
    first = write_dataset(tmp_path / "first", vocab_size=60, tokens=500)
    copy = shutil.copytree(first, tmp_path / "copy")
    other = write_dataset(tmp_path / "other", vocab_size=60, tokens=700)
    assert run_ranks(f"{HERE}:opened", 2, [first, copy]) == ["the same"] * 2
    problems = run_ranks(f"{HERE}:opened", 3, [first, other, copy])
    for problem, folder in zip(problems, (first, other, copy), strict=True):
        assert problem.startswith(f"data.path={folder}: the ranks found different data there; ")
