"""What a description does that its keys do not show is said in one line each, once, at the start."""

from __future__ import annotations

import pytest

from recipes.config import RouterType
from recipes.launcher import Ranks
from recipes.pretrain import main
from recipes.validation.notes import notes
from tests.tiny import tiny_config, tiny_moe_config

OTHERS = "other documents and sequences of the micro-batch"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"moe__moe_router_type": RouterType.random}, []),
        ({"moe__moe_router_type": RouterType.sinkhorn}, ["moe_router_type=sinkhorn", "in training", OTHERS]),
        ({"moe__moe_router_type": RouterType.expert_choice}, ["=expert_choice", OTHERS, "later tokens of its own"]),
        ({"moe__moe_eval_capacity_factor": 2.0}, ["moe.moe_eval_capacity_factor=2.0", "full expert", OTHERS]),
        (
            {"moe__moe_expert_capacity_factor": 1.25, "moe__moe_eval_capacity_factor": 2.0},
            ["moe_expert_capacity_factor=1.25, moe.moe_eval", OTHERS],
        ),
        ({"data__reset_position_ids": True, "data__reset_attention_mask": True}, []),
        (
            {"data__reset_position_ids": True},
            ["data.reset_position_ids=true", "data.reset_attention_mask=false", "attend to earlier documents"],
        ),
        ({"data__reset_attention_mask": True}, ["data.reset_attention_mask=true", "positions go on"]),
    ],
)
def test_one_line_for_what_crosses_documents(changes, words):
    found = notes(tiny_moe_config(**changes))
    assert len(found) == bool(words)
    assert all(word in found[0] for word in words) and not any("\n" in note for note in found)


def test_a_dense_model_has_nothing_to_route():
    assert notes(tiny_config()) == []


def test_the_command_line_says_it_once(capsys, monkeypatch):
    plan = ["experiment=switch_paper_8e", "data.path=null", "model.vocab_size=64", "data.reset_position_ids=true"]
    assert main([*plan, "--dry-run"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert len(said) == 2 and "capacity_factor=1.25" in said[0] and "reset_position_ids=true" in said[1]
    other = Ranks(rank=1, local_rank=1, world_size=2, local_world_size=2, master_port=1024)
    for name, value in other.environment().items():
        monkeypatch.setenv(name, value)
    assert main([*plan, "--dry-run"]) == 0
    assert "note:" not in capsys.readouterr().err
