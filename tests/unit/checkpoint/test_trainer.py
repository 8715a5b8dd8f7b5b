"""One schema for trainer.json: what does not have it, or is not of the tensors beside it, is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.checkpoint.choose import places, sound
from recipes.checkpoint.format import Box, open_checkpoint, shard_name, write_shard
from recipes.checkpoint.rotate import begin, commit
from recipes.checkpoint.trainer import check_trainer
from recipes.config import Config, to_plain
from recipes.logical import initial_value, logical_tensors
from tests.tiny import tiny_moe_config

STATE: dict[str, Any] = {
    "step": 4,
    "consumed_samples": 32,
    "applied_steps": 3,
    "world_size": 1,
    "tensor_parallel_size": 1,
    "guard": {"accepted": [1.5, 2], "skipped": 1, "in_a_row": 0},
    "moe": {"previous_counts": [[1, 2, 3, 4]], "bias": [[0.0, 0.5, -0.5, 0.0]], "steps": 4},
    "wandb_run_id": "a1b2",
    "tokenizer": "t",
}

Change = Callable[[dict[str, Any]], object]


def stored(folder: Path, step: int = 4, change: Change = lambda state: None, config: Config | None = None) -> Path:
    """A checkpoint of the tiny mixture of experts with a changed trainer state: right sizes and checksums."""
    values = {name: initial_value(tensor, step) for name, tensor in logical_tensors(tiny_moe_config()).items()}
    state = copy.deepcopy(STATE) | {"step": step, "config": to_plain(config or tiny_moe_config())}
    change(state)
    partial = begin(folder, step)
    boxes = {"model": [Box.whole(name, value) for name, value in values.items()]}
    boxes["optimizer"] = [Box.whole(f"{m}/{n}", v) for n, v in values.items() for m in ("exp_avg", "exp_avg_sq")]
    records = [write_shard(partial, shard_name(kind, 0, 1), kind, members) for kind, members in boxes.items()]
    return commit(partial, records, state)


def test_what_a_run_writes_is_accepted(tmp_path: Path) -> None:
    without = [
        lambda state: None,
        lambda state: state.pop("tensor_parallel_size"),
        lambda state: state.update(moe=None),
    ]
    for step, change in enumerate(without, start=1):
        checkpoint = open_checkpoint(stored(tmp_path, step, change))
        assert to_plain(check_trainer(checkpoint)) == to_plain(tiny_moe_config())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(step=5), "step=5, but the manifest is of step 4"),
        (lambda s: s.update(step="4"), "step=4: must be an integer"),
        (lambda s: s.pop("guard"), "guard: is missing"),
        (lambda s: s["guard"].pop("in_a_row"), "guard.in_a_row: is missing"),
        (lambda s: s["guard"].update(accepted=[1, "x"]), r"guard.accepted\[1\]=x: must be a number"),
        (lambda s: s["guard"].update(accepted=[-1.0]), "guard.accepted=-1.0"),
        (lambda s: s["guard"].update(accepted=[10**400]), r"guard.accepted\[0\]=2.1328.* must be finite"),
        (lambda s: s["guard"].update(skipped=-1), "guard.skipped=-1 must be at least 0"),
        (lambda s: s.update(guard=[[[]]]), "guard=.*: must be a group"),
        (lambda s: s.update(applied_steps=-1), "applied_steps=-1"),
        (lambda s: s.update(applied_steps=2**63), "applied_steps=9223372036854775808 must be at least 0 and below"),
        (lambda s: s.update(world_size=0), "world_size=0 must be at least 1"),
        (lambda s: s.update(consumed_samples=True), "consumed_samples=true: must be an integer"),
        (lambda s: s.update(wandb_run_id="a/b"), "wandb_run_id='a/b'"),
        (lambda s: s.update(wandb_run_id="x" * 1000), "wandb_run_id="),
        (lambda s: s.update(tokenizer=None), "tokenizer=null: must be text"),
        (lambda s: s["moe"].update(bias=[[0.0] * 5]), r"moe.bias of \[5\] experts by layer, its config says \[4\]"),
        (lambda s: s["moe"].update(bias=[[0.0, 0.0, 0.0, 1e300]]), "moe.bias: 1e\\+300"),
        (lambda s: s["moe"].update(previous_counts=[[1, 2, 3, -4]]), "moe.previous_counts: -4"),
        (lambda s: s["moe"].update(steps=-1), "moe.steps=-1"),
        (lambda s: s.pop("config"), "description=null: is a group of settings"),
        (lambda s: s["config"]["model"].update(hidden_size=10**6), "hidden_size=1000000|its config says"),
        (lambda s: s["config"]["moe"].update(num_moe_experts=10**4), "up to 10000 experts cannot be those"),
        (lambda s: s["config"]["moe"].update(moe_router_topk=9), "moe.moe_router_topk=9"),
        (lambda s: s["config"]["model"].update(make_vocab_size_divisible_by=10**6), "pads the vocabulary of 60"),
        (
            lambda s: s["config"]["model"].update(layernorm_epsilon=-1.0),
            "model.layernorm_epsilon=-1.0 must be at least",
        ),
        (lambda s: s["config"]["train"].update(micro_batch_size=10**6), "train.global_batch_size=8 must be divisible"),
    ],
)
def test_others_are_refused_by_key(tmp_path: Path, change: Change, message: str) -> None:
    path = stored(tmp_path, change=change)
    with pytest.raises(ValueError, match=message) as caught:
        check_trainer(open_checkpoint(path))
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_a_state_that_does_not_fit_is_passed_over_as_damage_is(tmp_path: Path) -> None:
    older = stored(tmp_path, 3)
    newer = stored(tmp_path, 4, lambda state: state["guard"].update(skipped=None))
    said: list[str] = []
    found = sound(places(tmp_path), ("model", "trainer"), said.append)
    assert found.path == older and found.trusted == {"model-00000-of-00001.safetensors", "trainer.json"}
    assert len(said) == 1 and said[0].startswith(
        f"passed over: {newer}/trainer.json: guard.skipped=null: must be an integer"
    )
    with pytest.raises(ValueError, match=r"trainer\.json: guard\.skipped=null: must be an integer"):
        sound(places(newer), ("model", "trainer"), said.append)


def test_trainer_and_manifest_of_different_steps_do_not_mix(tmp_path: Path) -> None:
    paths = [stored(tmp_path, step) for step in (3, 4)]
    (paths[1] / "trainer.json").write_bytes((paths[0] / "trainer.json").read_bytes())
    with pytest.raises(ValueError, match=r"trainer\.json: .*(changed|sha256 differs)"):
        sound(places(paths[1]), ("model", "trainer"), print)


def test_a_folder_under_the_name_of_another_step_is_refused_by_name(tmp_path: Path) -> None:
    path = stored(tmp_path, 4)
    path.rename(tmp_path / "step_00000009")
    with pytest.raises(ValueError, match="step_00000009: the manifest is of step 4"):
        sound(places(tmp_path / "step_00000009"), ("model", "trainer"), print)
    (tmp_path / "step_00000009").rename(tmp_path / "best")
    assert sound(places(tmp_path / "best"), ("model", "trainer"), print).step == 4


def test_integer_weights_are_not_taken_for_numbers(tmp_path: Path) -> None:
    values = {name: initial_value(tensor, 1) for name, tensor in logical_tensors(tiny_moe_config()).items()}
    values["final_norm.weight"] = values["final_norm.weight"].to(torch.float16)
    partial = begin(tmp_path, 4)
    record = write_shard(partial, "a.safetensors", "model", [Box.whole(name, value) for name, value in values.items()])
    path = commit(partial, [record], STATE | {"config": to_plain(tiny_moe_config())})
    with pytest.raises(ValueError, match=r"tensor 'final_norm\.weight' is .*float16.*its config says .*float32"):
        check_trainer(open_checkpoint(path))
