"""The life of checkpoint folders under kills, full disks, damage and other runs' leftovers."""

import errno
import io
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.checkpoint import format as checkpoint_format
from recipes.checkpoint import rotate as checkpoint_rotate
from recipes.checkpoint.format import MANIFEST, TRAINER, Box, open_checkpoint, shard_name, write_shard
from recipes.checkpoint.rotate import LATEST, begin, commit, find_checkpoint, rotate

Save = Callable[..., Path]
MODEL_1 = shard_name("model", 1, 2)


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def truncate(folder: Path) -> None:
    os.truncate(folder / MODEL_1, 100)


def remove_file(folder: Path) -> None:
    (folder / shard_name("rng", 1, 2)).unlink()


def remove_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def wrong_step(folder: Path) -> None:
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"step": 20', '"step": 10'))


def age(folder: Path, committed_at: float) -> None:
    """Pretend that a checkpoint was committed at another time."""
    text = (folder / MANIFEST).read_text()
    now = open_checkpoint(folder).manifest.committed_at
    (folder / MANIFEST).write_text(text.replace(f'"committed_at": {now!r}', f'"committed_at": {committed_at!r}'))
    assert open_checkpoint(folder).manifest.committed_at == committed_at


# ---------------------------------------------------------------- commit


def test_a_commit_is_selectable_only_when_it_is_whole(root: Path, save: Save) -> None:
    partial = begin(root, 10)
    assert find_checkpoint(root) == (None, [])
    write_shard(partial, "model.safetensors", "model", [Box.whole("w", torch.ones(2))])
    assert find_checkpoint(root) == (None, [])
    folder = save(10)
    assert folder == root / "step_00000010" and names(root) == {"step_00000010", LATEST}
    assert (root / LATEST).read_text() == "step_00000010\n"
    assert find_checkpoint(root) == (folder, [])
    assert open_checkpoint(folder).verify() == []


def test_an_empty_or_absent_folder_starts_anew(root: Path) -> None:
    assert find_checkpoint(root) == (None, [])
    root.mkdir(parents=True)
    assert find_checkpoint(root) == (None, [])


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([[Box("w", (4,), (0,), torch.ones(2))], []], "'w': a hole"),
        ([[Box("w", (4,), (0,), torch.ones(2))], [Box("w", (4,), (1,), torch.ones(3))]], "'w': boxes overlap"),
        ([[Box.whole("w", torch.ones(2))], [Box.whole("w", torch.ones(2))]], "'w': boxes overlap"),
        ([[Box("w", (4,), (0,), torch.ones(2))], [Box("w", (5,), (2,), torch.ones(3))]], "another rank F32"),
        ([[Box("w", (4,), (0,), torch.ones(2))], [Box("w", (4,), (2,), torch.ones(2).double())]], "another rank F32"),
    ],
)
def test_ranks_that_disagree_are_refused_and_the_old_one_stays(
    root: Path, save: Save, boxes: list[list[Box]], message: str
) -> None:
    old = save(10)
    partial = begin(root, 20)
    records = [write_shard(partial, shard_name("model", i, 2), "model", part) for i, part in enumerate(boxes)]
    with pytest.raises(ValueError, match=message):
        commit(partial, records, {})
    assert find_checkpoint(root) == (old, [])


def test_a_rank_that_did_not_save_is_noticed(root: Path) -> None:
    for lose, message in (("file", "rng-1.safetensors: is missing"), ("record", "rng-1.safetensors belongs to no")):
        partial = begin(root, 10)
        box = [Box.whole("w", torch.ones(2))]
        records = [write_shard(partial, "model.safetensors", "model", box)]
        lost = write_shard(partial, "rng-1.safetensors", "rng", box)
        if lose == "file":
            records.append(lost)
            (partial / "rng-1.safetensors").unlink()
        with pytest.raises(ValueError, match=message):
            commit(partial, records, {})
        assert find_checkpoint(root) == (None, [])


def test_one_file_name_on_two_ranks_is_refused(root: Path) -> None:
    partial = begin(root, 10)
    record = write_shard(partial, "model.safetensors", "model", [Box.whole("w", torch.ones(2))])
    with pytest.raises(ValueError, match="written by two ranks"):
        commit(partial, [record, record], {})


@pytest.mark.parametrize(
    "state", [{"lr": math.nan}, {"lr": math.inf}, {"lr": (1, 2)}, {"lr": {1: 2}}, {"lr": torch.ones(1)}, {"lr": {1}}]
)
def test_trainer_state_that_json_would_change_is_refused(root: Path, state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"trainer\.json"):
        commit(begin(root, 10), [], state)


def test_trainer_state_comes_back_exactly(save: Save) -> None:
    state = {"lr": 0.1 + 0.2, "tokens": 2**60, "text": "再開 \u2028", "none": None, "list": [1, 2.5, {"a": True}]}
    assert open_checkpoint(save(1, **state)).trainer == {"step": 1, **state}


# ---------------------------------------------------------------- find


def test_an_explicit_step_is_that_step_or_an_error(root: Path, save: Save) -> None:
    save(10)
    save(20)
    assert find_checkpoint(root, 10) == (root / "step_00000010", [])
    with pytest.raises(ValueError, match=r"step 40: not in .*the steps there are: 10, 20"):
        find_checkpoint(root, 40)
    truncate(root / "step_00000010")
    with pytest.raises(ValueError, match=f"{MODEL_1}: 100 bytes instead of"):
        find_checkpoint(root, 10)
    with pytest.raises(ValueError, match="the steps there are: none"):
        find_checkpoint(root / "absent", 10)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, f"{MODEL_1}: 100 bytes instead of"),
        (remove_file, "rng-00001-of-00002.safetensors: is missing"),
        (remove_manifest, "no manifest.json, so it is no complete checkpoint"),
        (wrong_step, "the manifest is of step 10"),
        (shutil.rmtree, "names 'step_00000020', which is no checkpoint there"),
    ],
)
def test_a_damaged_newest_falls_back_and_says_why(
    root: Path, save: Save, damage: Callable[[Path], Any], reason: str
) -> None:
    old = save(10)
    damage(save(20))
    path, skipped = find_checkpoint(root)
    assert path == old
    assert len(skipped) == 1 and reason in skipped[0]


@pytest.mark.parametrize(
    "content", [b"", b"\xff\x00garbage", b"step_00000099\n", b"../step_00000010", b"x" * 10_000, None]
)
def test_garbage_in_latest_falls_back_to_the_one_committed_last(root: Path, save: Save, content: bytes | None) -> None:
    save(1000)
    newest = save(10)
    (root / LATEST).unlink()
    if content is not None:
        (root / LATEST).write_bytes(content)
    path, skipped = find_checkpoint(root)
    assert path == newest
    assert len(skipped) == 1 and str(root / LATEST) in skipped[0]


def test_latest_is_obeyed_and_links_are_not(root: Path, save: Save, tmp_path: Path) -> None:
    first = save(10)
    save(20)
    (root / LATEST).write_text("step_00000010")
    assert find_checkpoint(root) == (first, [])
    (root / LATEST).unlink()
    (tmp_path / "text").write_text("step_00000010")
    (root / LATEST).symlink_to(tmp_path / "text")
    path, skipped = find_checkpoint(root)
    assert path == root / "step_00000020" and "regular file" in skipped[0]
    (root / "step_00000030").symlink_to(first)
    with pytest.raises(ValueError, match="the steps there are: 10, 20"):
        find_checkpoint(root, 30)


def test_nothing_complete_is_no_fresh_start(root: Path, save: Save) -> None:
    truncate(save(10))
    remove_manifest(save(20))
    with pytest.raises(ValueError, match=r"no checkpoint is complete: .*100 bytes.*start anew"):
        find_checkpoint(root)


def test_weights_only_counts_as_complete_for_who_needs_weights(root: Path, save: Save) -> None:
    folder = save(10)
    for file in folder.glob("optimizer-*"):
        file.unlink()
    assert find_checkpoint(root, kinds=("model",)) == (folder, [])
    assert find_checkpoint(root, 10, kinds=("model", "trainer")) == (folder, [])
    with pytest.raises(ValueError, match=r"optimizer-00000-of-00002\.safetensors: is missing"):
        find_checkpoint(root, 10)


# ---------------------------------------------------------------- rotate


@pytest.mark.parametrize("keep", [0, -1])
def test_keep_below_one_is_refused(root: Path, save: Save, keep: int) -> None:
    save(10)
    with pytest.raises(ValueError, match=f"checkpoint.keep={keep}: must be >= 1"):
        rotate(root, keep)
    assert "step_00000010" in names(root)


def test_the_oldest_go_first(root: Path, save: Save) -> None:
    for step in (10, 20, 30):
        save(step)
    assert rotate(root, 2) == [root / "step_00000010"]
    assert rotate(root, 2) == []
    assert rotate(root, 1) == [root / "step_00000020"]
    assert names(root) == {"step_00000030", LATEST}


def test_a_higher_step_of_another_run_does_not_push_out_the_new_one(root: Path, save: Save) -> None:
    save(1000)
    new = save(10)
    assert rotate(root, 1) == [root / "step_00001000"]
    assert find_checkpoint(root) == (new, [])


def test_even_a_clock_that_ran_ahead_does_not_push_out_the_new_one(root: Path, save: Save) -> None:
    age(save(1000), 9e9)
    new = save(10)
    rotate(root, 1)
    assert names(root) == {new.name, LATEST}


def test_the_one_resumed_from_stays(root: Path, save: Save) -> None:
    resumed = save(10)
    for step in (20, 30, 40):
        save(step)
    elsewhere = root.parent / "other" / "step_00000020"  # another run's step 20 does not protect ours
    assert rotate(root, 1, protect=[resumed, elsewhere]) == [root / "step_00000020", root / "step_00000030"]
    assert names(root) == {"step_00000010", "step_00000040", LATEST}


@pytest.mark.parametrize("damage", [truncate, remove_manifest])
def test_nothing_is_deleted_when_the_newest_is_damaged(root: Path, save: Save, damage: Callable[[Path], Any]) -> None:
    save(10)
    save(20)
    damage(save(30))
    with pytest.raises(ValueError, match="nothing was deleted"):
        rotate(root, 1)
    assert names(root) == {"step_00000010", "step_00000020", "step_00000030", LATEST}


def test_a_damaged_one_neither_counts_nor_goes(root: Path, save: Save) -> None:
    for step in (10, 20):
        save(step)
    truncate(save(30))
    save(40)
    assert rotate(root, 2) == [root / "step_00000010"]
    assert names(root) == {"step_00000020", "step_00000030", "step_00000040", LATEST}


def test_what_is_not_ours_is_never_deleted(root: Path, save: Save, tmp_path: Path) -> None:
    save(10)
    save(20)
    (tmp_path / "precious").mkdir()
    (root / "step_00000005").symlink_to(tmp_path / "precious")
    (root / "notes.txt").write_text("mine")
    (root / "step_5").mkdir()
    rotate(root, 1)
    save(30)
    assert names(root) == {"step_00000005", "notes.txt", "step_5", "step_00000020", "step_00000030", LATEST}
    assert (tmp_path / "precious").is_dir()


# ---------------------------------------------------------------- full disk


class FullDisk(io.FileIO):
    """A file on a disk that fills up half way."""

    def write(self, data: Any) -> int:
        super().write(bytes(data)[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("victim", [shard_name("model", 0, 2), MODEL_1, TRAINER, MANIFEST, ".latest.new"])
def test_a_disk_that_fills_up_leaves_the_old_one(
    root: Path, save: Save, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    old = save(10)

    def opened(path: Path | int, mode: str, **options: Any) -> Any:
        full = isinstance(path, Path) and path.name == victim
        return FullDisk(path, mode) if full else open(path, mode, **options)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_format, "open", opened, raising=False)
        with pytest.raises(OSError, match="No space left"):
            save(20)
    assert find_checkpoint(root) == (old, [])
    assert open_checkpoint(old).verify() == []
    new = save(30)  # and when there is space again, the remains go
    rotate(root, 1)
    assert names(root) == {new.name, LATEST}


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB, where this process may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting a tiny disk needs root")
def test_a_disk_that_is_really_full(tiny_disk: Path) -> None:
    root = tiny_disk / "checkpoints"

    def save(step: int, numel: int) -> Path:
        partial = begin(root, step)
        record = write_shard(partial, "model.safetensors", "model", [Box.whole("w", torch.ones(numel))])
        return commit(partial, [record], {})

    old = save(10, 100_000)
    with pytest.raises(OSError, match=r"No space left.*\.step_00000020\.partial/model\.safetensors"):
        save(20, 200_000)
    assert find_checkpoint(root) == (old, [])
    assert open_checkpoint(old).verify() == []
    assert find_checkpoint(root) == (old, [])
    assert save(20, 100_000).is_dir()  # the half-written one was removed first, else this would not fit


# ---------------------------------------------------------------- kill -9


def die_at(count: int) -> None:
    """Replace every call that changes the disk by one that counts down to SIGKILL; deleting dies half way."""
    left = count

    def now() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if now():
                die()
            return function(*args, **kwargs)

        return call

    def parts(header: bytes, boxes: list[Box]) -> Iterator[bytes | memoryview]:
        yield header[: len(header) // 2]
        if now():
            die()
        yield header[len(header) // 2 :]
        yield from list(whole_parts(header, boxes))[1:]

    def rmtree(folder: Path, **options: Any) -> None:
        if now():
            for path in list(folder.iterdir())[::2]:
                path.unlink()
            die()
        whole_rmtree(folder, **options)

    whole_parts, whole_rmtree = checkpoint_format._parts, shutil.rmtree
    checkpoint_format._parts = parts  # type: ignore[assignment]
    checkpoint_rotate.shutil.rmtree = rmtree  # type: ignore[assignment]
    os.fsync = before(os.fsync)
    os.replace = before(os.replace)
    Path.rename = before(Path.rename)  # type: ignore[method-assign]
    Path.mkdir = before(Path.mkdir)  # type: ignore[method-assign]


def killed_at(count: int, action: Callable[[], Any]) -> bool:
    """Run `action` in a fork that is killed at its `count`-th change of the disk; False when it got through."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            die_at(count)
            action()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


@pytest.mark.parametrize("step", [20, 10], ids=["a new step", "the same step again"])
def test_killed_anywhere_there_is_one_to_resume_from(root: Path, save: Save, step: int) -> None:
    def action() -> None:
        save(step, run="new")
        rotate(root, 1)

    kills = 0
    while True:
        shutil.rmtree(root, ignore_errors=True)
        save(10, run="old")
        killed = killed_at(kills + 1, action)
        path, skipped = find_checkpoint(root)
        assert path is not None and skipped == []
        found = open_checkpoint(path)
        assert found.verify() == []
        assert found.trainer in ({"step": 10, "run": "old"}, {"step": step, "run": "new"})
        save(30)  # the next save clears up whatever was left
        rotate(root, 1)
        assert names(root) == {"step_00000030", LATEST}
        if not killed:
            break
        kills += 1
    assert found.trainer == {"step": step, "run": "new"}
    assert kills >= 20


def test_a_replacement_cut_between_its_renames_is_undone(root: Path, save: Save) -> None:
    folder = save(10, run="old")
    folder.rename(root / ".step_00000010.replaced")
    path, skipped = find_checkpoint(root)
    assert path == root / ".step_00000010.replaced" and skipped == []
    assert find_checkpoint(root, 10) == (path, [])
    begin(root, 20)
    assert find_checkpoint(root) == (folder, [])
    assert open_checkpoint(folder).trainer["run"] == "old"
