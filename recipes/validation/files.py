"""What is on disk: run folder, checkpoint, data. Nothing is written."""

from __future__ import annotations

import tempfile
from pathlib import Path

from recipes import schema
from recipes.config import CheckpointLoad, Config, Resume
from recipes.data.blend import require_samples, resolve_weights
from recipes.data.dataset import load_dataset
from recipes.fields import CONTENT, TOKENIZER
from recipes.validation.limits import Problems


def check_run_folder(config: Config, launch_dir: Path) -> Problems:
    """A folder that can be made and written, or one to go on with."""
    run, load_step = config.run, config.checkpoint.load_step
    if not run.name.strip() or "/" in run.name or "\0" in run.name:
        yield f"run.name={run.name!r} becomes part of a folder name: it must not be empty or contain '/'"
    if run.dir is not None and (not run.dir.strip() or "\0" in run.dir):
        yield f"run.dir={run.dir!r} must name a folder, or be null"
        return
    if run.resume is Resume.auto and run.dir is None:
        yield "run.resume=auto needs the folder of the run to go on with; add run.dir=FOLDER"
    yield from _accepted(config)
    if load_step is not None and run.resume is not Resume.auto:
        yield f"checkpoint.load_step={load_step} needs run.resume=auto and run.dir=FOLDER; add them, or leave it null"
    elif load_step is not None and run.dir is not None:
        yield from _load_step(launch_dir / run.dir / "checkpoints", load_step)
    folder = launch_dir / (run.dir if run.dir is not None else "outputs")
    if folder.exists() and not folder.is_dir():
        yield f"run.dir={folder} is a file; choose another folder"
    elif run.dir is not None and folder.exists() and run.resume is Resume.never:
        yield f"run.dir={run.dir} exists; choose another folder, or go on from its newest checkpoint by run.resume=auto"
    else:
        yield from _writable(folder)


def _accepted(config: Config) -> Problems:
    """Where the run starts from, and which changes it accepts."""
    run, checkpoint = config.run, config.checkpoint
    if checkpoint.load is CheckpointLoad.weights and checkpoint.load_from is None:
        yield "checkpoint.load=weights starts a new run from another run's checkpoint; add checkpoint.load_from=FOLDER"
    if run.resume_with and run.resume is Resume.never and checkpoint.load_from is None:
        shown = schema.show(run.resume_with)
        yield f"run.resume_with={shown} accepts changes of a run that goes on; add run.resume=auto and run.dir=FOLDER"
    for key in run.resume_with:
        if key not in schema.entries() and key not in (TOKENIZER, CONTENT):
            yield f"run.resume_with: {schema.unknown_key(key)}; of the data folder {TOKENIZER} and {CONTENT}"


def _load_step(checkpoints: Path, step: int) -> Problems:
    if not (checkpoints / f"step_{step:08d}").is_dir() and not (checkpoints / f".step_{step:08d}.replaced").is_dir():
        steps = sorted(int(path.name[5:]) for path in checkpoints.glob("step_*") if path.name[5:].isdecimal())
        there = ", ".join(map(str, steps)) or "none"
        yield f"checkpoint.load_step={step}: not in {checkpoints}; the steps there are: {there}"


def _writable(folder: Path) -> Problems:
    """Whether the folder can be made and written; permission bits alone do not tell (root, read-only mounts)."""
    try:
        ancestor = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=ancestor):
            pass
    except OSError as error:
        yield f"run.dir={folder}: cannot write in {ancestor} ({error.strerror}); choose a folder that you may write to"


def check_data(config: Config, launch_dir: Path, dry_run: bool) -> Problems:
    """A readable data set whose tokenizer, domains and number of samples fit the description."""
    data, model = config.data, config.model
    if data.path is None:
        if not dry_run:
            yield "data.path=null: no data; give data.path=FOLDER written by `python -m tools.index`"
        elif model.vocab_size is None:
            yield "model.vocab_size=null and data.path=null: give one of them, the sizes depend on the vocabulary"
        return
    try:
        info = load_dataset(launch_dir / data.path)
    except ValueError as error:
        yield f"data.path={data.path}: {error}"
        return
    if model.vocab_size not in (None, info.vocab_size):
        theirs = f"the tokenizer of data.path={data.path} has {info.vocab_size}"
        yield f"model.vocab_size={model.vocab_size} but {theirs}; set model.vocab_size=null, or use other data"
    try:
        if data.wrap:
            resolve_weights(info.tokens(), data.domain_weights)
        else:
            num_samples = config.train.steps * config.train.global_batch_size
            require_samples(info, data.domain_weights, model.seq_length, num_samples)
    except ValueError as error:
        yield str(error)
