"""Which changes a run goes on with, which are refused, and that each is said."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes import schema
from recipes.checkpoint.format import Box, Checkpoint, open_checkpoint, write_shard
from recipes.checkpoint.rotate import begin, commit
from recipes.config import CheckpointLoad, Config, DecayStyle, to_plain
from recipes.data import identity
from recipes.data.dataset import DatasetInfo, load_dataset
from recipes.data.synthetic import write_dataset
from recipes.description import check_description, read_description
from recipes.fields import CONTENT, TOKENIZER, OnResume, Said, classes
from recipes.logical import logical_tensors
from recipes.train.resume import check_resume, check_start
from recipes.validation import prepare, problems
from tests.tiny import tiny_moe_config

STEP = 4


def described(**changes: Any) -> Config:
    """An MoE run of 10 steps, as it is recorded; `changes`: values by group__name."""
    config = tiny_moe_config(train__steps=10, data__path=None, **changes)
    return prepare(config, 1, launch_dir=Path.cwd())


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> DatasetInfo:
    return load_dataset(write_dataset(tmp_path_factory.mktemp("data") / "set", 60, 4000))


def write_checkpoint(folder: Path, config: Config, info: DatasetInfo, step: int = STEP, **trainer: Any) -> Checkpoint:
    """Weights of zeros and the trainer state that decides on a resume."""
    partial = begin(folder / "checkpoints", step)
    boxes = [Box.whole(name, torch.zeros(tensor.shape)) for name, tensor in logical_tensors(config).items()]
    state = {
        "step": step,
        "consumed_samples": 8 * step,
        "applied_steps": step,
        "world_size": 1,
        "guard": {"accepted": [], "skipped": 0, "in_a_row": 0},
        "moe": None,
        "config": to_plain(config),
        "tokenizer": info.tokenizer_fingerprint,
        "data": identity.record(info),
        "wandb_run_id": None,
    }
    records = [write_shard(partial, "model-00000-of-00001.safetensors", "model", boxes)]
    return open_checkpoint(commit(partial, records, state | trainer))


@pytest.fixture(scope="module")
def checkpoint(data, tmp_path_factory) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp("run"), described(), data)


def other_value(entry: schema.Entry, value: Any) -> Any:
    """A legal value of the key's type that is not `value`."""
    kind, _ = schema.without_null(entry.hint)
    kind = schema.bare(kind)[0]
    candidates: list[Any] = [
        True,
        False,
        0.5,
        0.25,
        2,
        3,
        1,
        64,
        "other",
        [1],
        [1, 2],
        ["mlp"],
        ["split"],
        {"b": 1.0},
        None,
    ]
    members = getattr(kind, "__members__", None)
    for candidate in list(members) if members else candidates:
        if candidate == value or (isinstance(candidate, bool) != isinstance(value, bool) and value is not None):
            continue
        plain = to_plain(Config())
        group, _, name = entry.key.partition(".")
        plain[group][name] = candidate
        if not read_description(plain)[1]:
            return candidate
    raise AssertionError(f"no other value for {entry.key}")


def changed(key: str) -> tuple[Config, Any, Any]:
    """The run with another value of one key; the old and the new one."""
    plain, (group, _, name) = to_plain(described()), key.partition(".")
    old = plain[group][name]
    plain[group][name] = other_value(schema.entries()[key], old)
    config, found = read_description(plain)
    assert not found
    return config, old, plain[group][name]


KEYS = {kind: [e.key for e in schema.entries().values() if e.on_resume is kind] for kind in OnResume}


def test_there_are_keys_of_every_class():
    assert len(KEYS[OnResume.identity]) > 70 and len(KEYS[OnResume.said]) > 30
    assert set(KEYS[OnResume.free]) >= {"run.dir", "run.resume", "run.resume_with", "checkpoint.load_step"}


@pytest.mark.parametrize("key", [key for key in KEYS[OnResume.identity] if key != "schedule.lr_decay_steps"])
def test_another_identity_is_refused_with_both_values_and_accepted_by_name(key, data, checkpoint):
    config, old, new = changed(key)
    with pytest.raises(ValueError) as caught:
        check_resume(config, data, checkpoint)
    shown = f"{key}={schema.show(new)} but the checkpoint has {schema.show(old)}"
    assert shown in str(caught.value) and f"'run.resume_with=[{key}]'" in str(caught.value)
    config.run.resume_with = [key]
    try:
        notes = check_resume(config, data, checkpoint)
    except ValueError as error:  # what was accepted is another model
        assert "model tensor" in str(error) and key.startswith(("model.", "moe."))
    else:
        line = f"resumed with changed {key}: {schema.show(old)} -> {schema.show(new)} (accepted by run.resume_with)"
        assert notes == [line]


@pytest.mark.parametrize("key", [key for key in KEYS[OnResume.said] if key != "train.steps"])
def test_what_may_change_is_said_in_one_line(key, data, checkpoint):
    config, old, new = changed(key)
    assert check_resume(config, data, checkpoint) == [
        f"resumed with changed {key}: {schema.show(old)} -> {schema.show(new)}"
    ]


@pytest.mark.parametrize("key", KEYS[OnResume.free])
def test_what_does_not_matter_is_not_said(key, data, checkpoint):
    config, _, _ = changed(key)
    notes = check_resume(config, data, checkpoint)
    assert notes == [] or key == "run.resume_with"


def test_every_refusal_is_in_one_message(data, checkpoint):
    config = described(optimizer__lr=0.5, data__eod_mask_loss=True, run__seed=7)
    config.run.resume_with = ["run.seed"]
    with pytest.raises(ValueError) as caught:
        check_resume(config, data, checkpoint)
    text = str(caught.value)
    assert "optimizer.lr=0.5 but" in text and "data.eod_mask_loss=true but" in text and "run.seed=" not in text
    assert "'run.resume_with=[run.seed,data.eod_mask_loss,optimizer.lr]'" in text


def test_a_key_that_has_not_changed_is_said(data, checkpoint):
    config = described(run__resume_with=["optimizer.lr", CONTENT])
    assert check_resume(config, data, checkpoint) == [
        f"run.resume_with names {key}, which has not changed" for key in (CONTENT, "optimizer.lr")
    ]


@dataclasses.dataclass
class Group:
    old: Said[int] = 1
    new: int = 2


def test_a_new_key_needs_a_class():
    with pytest.raises(TypeError, match=r"Group\.new: annotate it as Identity\[\.\.\.\]"):
        classes(Group)


def test_the_readme_has_the_table_that_the_program_prints():
    readme = (Path(__file__).parents[3] / "recipes" / "README.md").read_text(encoding="utf-8")
    table = schema.resume_table()
    assert all(f"`{key.partition('.')[2]}`" in table for key in schema.entries())
    assert table in readme, "python -m recipes.schema prints it"


# the data


def copied(data: DatasetInfo, folder: Path) -> Path:
    return Path(shutil.copytree(data.folder, folder))


def test_other_text_is_refused_with_both_and_accepted_by_name(data, checkpoint, tmp_path):
    again = load_dataset(write_dataset(tmp_path / "seed", 60, 4000, seed=1))
    more = load_dataset(write_dataset(tmp_path / "more", 60, 4000, domains=("a", "b", "c")))
    less = load_dataset(write_dataset(tmp_path / "less", 60, 4000, domains=("a",)))
    for info, there, here in (
        (again, "a train 3,", "a train 3,"),
        (more, "no c train", "c train"),
        (less, "b train", "no b"),
    ):
        with pytest.raises(ValueError) as caught:
            check_resume(described(), info, checkpoint)
        new, _, old = str(caught.value).partition(" but the checkpoint has ")
        assert CONTENT in new and here in new and there in old and f"run.resume_with=[{CONTENT}]" in old
        (note,) = check_resume(described(run__resume_with=[CONTENT]), info, checkpoint)
        assert note.startswith(f"resumed with changed {CONTENT}: ") and " -> " in note
    assert check_resume(described(), load_dataset(copied(data, tmp_path / "moved")), checkpoint) == []


def test_one_changed_token_is_seen_where_dataset_json_has_no_digests(data, tmp_path):
    old = dataclasses.replace(
        data,
        domains={
            d: {s: dataclasses.replace(i, content=None) for s, i in splits.items()}
            for d, splits in data.domains.items()
        },
    )
    assert identity.record(old) == identity.record(data), "small files are read"
    moved = dataclasses.replace(old, folder=copied(data, tmp_path / "copy"))
    assert identity.changes(identity.record(data), moved) is None
    file = moved.folder / "b_train.bin"
    file.write_bytes(file.read_bytes()[:-2] + b"\x07\x07")
    assert identity.changes(identity.record(data), moved) is not None


def test_large_files_without_digests_are_compared_at_sampled_places(data, tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "_WHOLE_BYTES", 100)
    monkeypatch.setattr(identity, "_BLOCK_BYTES", 16)
    bare = {
        d: {s: dataclasses.replace(i, content=None) for s, i in splits.items()} for d, splits in data.domains.items()
    }
    old = dataclasses.replace(data, domains=bare)
    sampled = identity.record(old)
    assert sampled["domains"]["a"]["train"]["bin"].startswith("sampled:")
    assert identity.changes(sampled, old) is None
    assert identity.changes(sampled, data) is None, "digests were added to dataset.json since"
    assert identity.changes(identity.record(data), old) is None, "or have gone"
    moved = dataclasses.replace(old, folder=copied(data, tmp_path / "copy"))
    file = moved.folder / "a_train.bin"
    file.write_bytes(file.read_bytes()[:-2] + b"\x07\x07")
    assert identity.changes(sampled, moved) is not None


def test_another_tokenizer_or_end_of_document_is_refused(data, checkpoint):
    for change in ({"tokenizer_fingerprint": "f" * 64}, {"eod": 5}):
        other = dataclasses.replace(data, **change)
        with pytest.raises(
            ValueError, match=rf"{TOKENIZER}=.* but the checkpoint has {data.tokenizer_fingerprint[:12]}"
        ):
            check_resume(described(), other, checkpoint)
        (note,) = check_resume(described(run__resume_with=[TOKENIZER]), other, checkpoint)
        assert note.startswith(f"resumed with changed {TOKENIZER}: ")


def test_a_checkpoint_without_a_record_of_its_data_says_so(data, tmp_path):
    old = write_checkpoint(tmp_path, described(), data)
    del old.trainer["data"]  # as earlier versions wrote it
    assert check_resume(described(), data, old) == ["the checkpoint does not record its data, which was not compared"]
    old.trainer["data"] = {"domains": [1]}
    with pytest.raises(ValueError, match="the record of the data is damaged"):
        check_resume(described(), data, old)


# the schedule


@pytest.fixture(scope="module")
def wsd(data, tmp_path_factory) -> dict[int, Checkpoint]:
    config = described(
        schedule__lr_decay_style=DecayStyle.wsd, schedule__wsd_decay_steps=3, schedule__lr_warmup_steps=2
    )
    folder = tmp_path_factory.mktemp("wsd")
    return {step: write_checkpoint(folder, config, data, step) for step in (7, 8)}  # the decay begins with step 8


def lengthened(**changes: Any) -> Config:
    base = {"schedule__lr_decay_style": DecayStyle.wsd, "schedule__wsd_decay_steps": 3, "schedule__lr_warmup_steps": 2}
    config = tiny_moe_config(data__path=None, **base | changes)
    return prepare(config, 1, launch_dir=Path.cwd())


def test_wsd_is_lengthened_before_its_decay_begins_without_a_flag(data, wsd):
    assert check_resume(lengthened(train__steps=20), data, wsd[7]) == ["resumed with changed train.steps: 10 -> 20"]
    explicit = lengthened(train__steps=10, schedule__lr_decay_steps=20)
    assert check_resume(explicit, data, wsd[7]) == ["resumed with changed schedule.lr_decay_steps: 10 -> 20"]
    with pytest.raises(ValueError, match=r"train\.steps=20 but the checkpoint has 10"):
        check_resume(lengthened(train__steps=20), data, wsd[8])
    with pytest.raises(ValueError, match=r"train\.steps=9 but the checkpoint has 10"):
        check_resume(lengthened(train__steps=9), data, wsd[7])
    with pytest.raises(ValueError, match=r"schedule\.wsd_decay_steps=4 but"):
        check_resume(lengthened(train__steps=20, schedule__wsd_decay_steps=4), data, wsd[7])


def test_a_decay_over_the_steps_moves_with_them(data, checkpoint):
    longer = described()
    longer.train.steps = longer.schedule.lr_decay_steps = 20
    with pytest.raises(ValueError) as caught:
        check_resume(longer, data, checkpoint)
    assert "train.steps=20 but the checkpoint has 10" in str(caught.value)
    assert "set schedule.lr_decay_steps=10 to keep its decay" in str(caught.value)
    for key in ("train.steps", "schedule.lr_decay_steps"):
        longer.run.resume_with = [key]
        assert check_resume(longer, data, checkpoint) == [
            "resumed with changed train.steps: 10 -> 20 (accepted by run.resume_with)"
        ]
    kept = described()
    kept.train.steps = 20
    assert check_resume(kept, data, checkpoint) == ["resumed with changed train.steps: 10 -> 20"]
    moved = described()
    moved.schedule.lr_decay_steps = 15
    with pytest.raises(ValueError, match=r"schedule\.lr_decay_steps=15 but the checkpoint has 10"):
        check_resume(moved, data, checkpoint)


def test_a_constant_rate_has_no_end_to_move(data, tmp_path):
    old = write_checkpoint(tmp_path, described(schedule__lr_decay_style=DecayStyle.constant), data)
    longer = described(schedule__lr_decay_style=DecayStyle.constant)
    longer.train.steps = longer.schedule.lr_decay_steps = 20
    assert check_resume(longer, data, old) == ["resumed with changed train.steps: 10 -> 20"]


# a new run from another's checkpoint


def test_a_start_from_everything_needs_the_same_model_and_says_the_rest(data, checkpoint):
    new = described(optimizer__lr=0.5, train__eval_samples=1)
    assert check_start(new, data, checkpoint) == ["started with changed optimizer.lr: 0.1 -> 0.5"]
    for config, key in (
        (described(model__rotary_base=5e5), "model.rotary_base"),
        (described(model__hidden_dropout=0.5), "model.hidden_dropout"),
    ):
        with pytest.raises(ValueError, match=rf"{key}=.* but the checkpoint has"):
            check_start(config, data, checkpoint)
        config.run.resume_with = [key]
        assert check_start(config, data, checkpoint)[0].endswith("(accepted by run.resume_with)")
    short = described()
    short.train.steps = STEP
    with pytest.raises(ValueError, match=r"train\.steps=4 must be above the checkpoint's step, 4; .*load=weights"):
        check_start(short, data, checkpoint)


def test_a_start_from_weights_needs_tensors_and_ids_alone(data, checkpoint):
    new = described(checkpoint__load=CheckpointLoad.weights, optimizer__lr=0.5, model__rotary_base=5e5, run__seed=3)
    new.train.steps = 2
    assert check_start(new, data, checkpoint) == ["started with changed model.rotary_base: 10000.0 -> 500000.0"]
    wider = described(checkpoint__load=CheckpointLoad.weights, model__ffn_hidden_size=64)
    with pytest.raises(ValueError, match=r"model tensor .* is \(.*\), the model needs \("):
        check_start(wider, data, checkpoint)
    with pytest.raises(ValueError, match=f"{TOKENIZER}="):
        check_start(new, dataclasses.replace(data, tokenizer_fingerprint="0" * 64), checkpoint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"run__resume_with": ["optimizer.lr"]},
            "run.resume_with=[optimizer.lr] accepts changes of a run that goes on",
        ),
        ({"run__resume_with": ["optimizer.rate"]}, "run.resume_with: optimizer.rate: unknown key"),
        ({"checkpoint__load": CheckpointLoad.weights}, "checkpoint.load=weights starts a new run"),
    ],
)
def test_what_cannot_mean_anything_is_refused_before_the_start(changes, message, tmp_path):
    config = tiny_moe_config(data__path=None, **changes)
    assert any(message in found for found in problems(copy.deepcopy(config), 1, launch_dir=tmp_path, dry_run=True))


def test_a_description_of_an_earlier_version_is_read_and_one_of_today_is_not_like_it():
    plain = to_plain(Config())
    plain["checkpoint"]["override_schedule"] = False
    del plain["run"]["resume_with"], plain["checkpoint"]["load"]
    assert check_description(plain) == Config()
    assert "checkpoint.override_schedule: is no longer a key" in read_description(plain)[1][0]


def test_the_former_key_names_its_successor():
    from recipes.pretrain import compose

    with pytest.raises(ValueError, match=r"checkpoint\.override_schedule.*run\.resume_with=\[train\.steps\]"):
        compose(["checkpoint.override_schedule=true"])
