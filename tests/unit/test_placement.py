"""Which rank holds and writes what, worked out as every rank does, without ranks."""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict

import pytest

from recipes.checkpoint.manifest import StoredBox, check_cover
from recipes.config import to_plain
from recipes.logical import logical_tensors, moe_layers
from recipes.placement import HeldBox, digest, held_boxes, owners
from recipes.pretrain import ROOT, compose
from recipes.topology import Layout
from recipes.validation.layouts import legal_layouts
from tests.tiny import tiny_config, tiny_moe_config

EXPERIMENTS = sorted(path.stem for path in (ROOT / "hydra_conf" / "experiment").glob("*.yaml"))
DATA_PARALLEL = (1, 2, 4)
TENSOR_PARALLEL = (1, 2, 4, 8)


def recipe(name, layers=4):
    """The model of a published recipe with so many of its layers at most."""
    config = compose([f"experiment={name}"])
    config.model.vocab_size = config.model.vocab_size or 4096
    config.model.num_layers = min(config.model.num_layers, layers)
    if config.moe.num_moe_experts_per_layer is not None:
        config.moe.num_moe_experts_per_layer = config.moe.num_moe_experts_per_layer[-len(moe_layers(config)) :]
    return config


def check_written_once(config, layout):
    """Every element of every tensor lies in one box, whose writer is a rank that holds it."""
    held, owner = held_boxes(config, layout), owners(config, layout)
    assert {(box.name, box.offsets) for box in held} == owner.keys() and len(held) == len(owner)
    assert all(owner[box.name, box.offsets] in box.ranks for box in held)
    parts = defaultdict(list)
    for box in held:
        parts[box.name].append((box.offsets, box.shape))
    tensors = logical_tensors(config)
    assert parts.keys() == tensors.keys()
    for name, boxes in parts.items():
        stored = tuple(StoredBox("file", str(number), *box) for number, box in enumerate(boxes))
        if boxes != [((0,) * len(tensors[name].shape), tensors[name].shape)]:  # not one box that is the tensor
            check_cover(name, tensors[name].shape, stored)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_published_recipes_are_written_once_in_every_layout(name):
    published = recipe(name)
    for tied in (True, False):
        published.model.share_embeddings_and_output_weights = tied
        for tensor in TENSOR_PARALLEL:
            for data in DATA_PARALLEL:
                etp = tensor if moe_layers(published) else 1
                check_written_once(published, Layout(tensor * data, tensor, expert_tensor_parallel_size=etp))


# vocabulary, make_vocab_size_divisible_by -> rows that are true on each of 4 tensor-parallel ranks
PADDINGS = {
    (60, 128): [60, 0, 0, 0],
    (60, 16): [16, 16, 16, 12],
    (60, 15): [15, 15, 15, 15],
    (501, 128): [128, 128, 128, 117],
    (501, 200): [200, 200, 101, 0],
    (4096, 128): [1024] * 4,
    (5000, 128): [1280, 1280, 1280, 1160],
    (32000, 128): [8064, 8064, 8064, 7808],
    (50257, 128): [12672, 12672, 12672, 12241],
    (128256, 128): [32128, 32128, 32128, 31872],
    (151936, 128): [38016, 38016, 38016, 37888],
}


@pytest.mark.parametrize(("vocab", "multiple"), PADDINGS)
def test_padding_of_every_sort_changes_no_owner_into_two(vocab, multiple):
    config = tiny_config(model__vocab_size=vocab, model__make_vocab_size_divisible_by=multiple, model__num_layers=4)
    for tied in (True, False):
        config.model.share_embeddings_and_output_weights = tied
        rows = {box.offsets: box.shape[0] for box in held_boxes(config, Layout(4, 4)) if box.name == "embedding.weight"}
        assert list(rows.values()) == [count for count in PADDINGS[vocab, multiple] if count]
        for tensor in TENSOR_PARALLEL:
            for data in DATA_PARALLEL:
                for stages in (1, 2, 4):
                    check_written_once(config, Layout(tensor * data * stages, tensor, stages))


@pytest.mark.parametrize("world_size", [4, 8])
def test_experts_are_written_once_in_every_legal_layout(world_size):
    config = tiny_moe_config(model__num_query_groups=4, moe__moe_shared_expert_intermediate_size=16)
    for layout in legal_layouts(config, world_size):
        check_written_once(config, layout)


def test_a_box_is_held_by_every_rank_with_its_place():
    config = tiny_moe_config(model__vocab_size=60, model__make_vocab_size_divisible_by=64)
    layout = Layout(
        8, 2, 2, expert_parallel_size=2
    )  # tensor: even and odd ranks; stages: 0-3, 4-7; experts 0, 1 | 2, 3
    held = {(box.name, box.offsets): box for box in held_boxes(config, layout)}
    assert held["embedding.weight", (0, 0)] == HeldBox("embedding.weight", (0, 0), (60, 32), (0, 2, 4, 6))
    assert ("embedding.weight", (64, 0)) not in held  # the second half of the rows is padding
    assert held["layers.0.attention.q.weight", (16, 0)].ranks == (1, 3)
    assert held["layers.1.attention.out.weight", (0, 16)].ranks == (5, 7)
    assert held["layers.0.attention_norm.weight", (0,)].ranks == (0, 1, 2, 3)
    assert held["final_norm.weight", (0,)].ranks == (4, 5, 6, 7)
    assert held["layers.0.moe.experts.1.up.weight", (0, 0)].ranks == (0, 2)
    assert held["layers.0.moe.experts.2.up.weight", (0, 0)].ranks == (1, 3)


@pytest.mark.parametrize("name", ["llama2_7b_64gpu_h100_bf16", "gpt_1b3_8gpu_h100_bf16", "switch_8e"])
def test_ranks_write_about_equally_much(name):
    config = recipe(name, layers=100)
    layout = Layout(16, 4, expert_tensor_parallel_size=4 if moe_layers(config) else 1)
    load = Counter()
    table = owners(config, layout)
    for box in held_boxes(config, layout):
        load[table[box.name, box.offsets]] += math.prod(box.shape)
    assert len(load) == layout.world_size and max(load.values()) < 1.6 * min(load.values())


def test_the_table_depends_on_description_and_layout_alone():
    config = tiny_config()
    table = owners(config, Layout(4, 2))
    assert digest(table) == digest(owners(copy.deepcopy(config), Layout(4, 2, sequence_parallel=True, zero_stage=2)))
    others = [(config, Layout(4, 1)), (config, Layout(4, 2, 2)), (tiny_config(model__vocab_size=129), Layout(4, 2))]
    digests = {digest(owners(*other)) for other in others}
    assert len(digests) == 3 and digest(table) not in digests
    assert to_plain(config) == to_plain(tiny_config())
