"""Command lines at random: each is answered, or refused by one message with exit code 2.

The keys are those of the schema, so that new ones are tried by themselves. `FUZZ=50 python -m pytest tests/fuzz` tries fifty times
as many; a case follows from its seed and number, which a failure shows.
"""

from __future__ import annotations

import copy
import functools
import os
import random
import resource
from collections.abc import Iterator

import pytest

from recipes import pretrain, schema
from recipes.btm import __main__ as btm
from tests.cli.fake_data import write_dataset
from tests.fuzz import values
from tests.fuzz.judging import FACTOR, try_all

SEEDS = (1, 20240102, 3056312)
COUNT = 300  # cases for each seed
MORE_MEMORY = 400 * 2**20  # bytes that all of them together may take
KEYS = schema.entries()
GROUPS = {group: pretrain._options(group) for group in pretrain._groups()}


@pytest.fixture(autouse=True)
def launch_dir(tmp_path, monkeypatch):
    """A launch directory with a small data set, none of a launcher's variables, and files read once for each choice of options."""
    for name in os.environ:
        if name.startswith("SLURM_") or name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SECRET_OF_MINE", "do-not-store-this")
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path / "data" / "laptop")
    merged = functools.cache(pretrain._merged_files)
    monkeypatch.setattr(pretrain, "_merged_files", lambda choices: copy.deepcopy(merged(choices)))
    return tmp_path


def _override(rng: random.Random) -> str:
    """One override: usually of a key that exists."""
    draw = rng.random()
    if draw < 0.07:
        group = rng.choice(list(GROUPS))
        return f"{group}={rng.choice([rng.choice(GROUPS[group][:4]), rng.choice(values.MAD), '../x', '[a,b]', group])}"
    entry = KEYS[rng.choice(list(KEYS))]
    key = entry.key
    if draw < 0.82:
        return f"{key}={values.text(entry.hint, rng)}"
    sign = rng.choice(["", "", "+", "++", "~", "~~", "-", "--", "+~"])
    strange = [
        f"{key}.{rng.choice(values.WORDS)}",
        f"{key[:-1]}",
        f"{key.upper()}",
        f"{key}@{rng.choice(list(GROUPS))}",
        f"{rng.choice(list(GROUPS))}@model",
        f"{rng.choice(list(GROUPS))}/{rng.choice(values.WORDS)}",
        key.partition(".")[0],
        "hydra.run.dir",
        "hydra/launcher",
        "a.b.c.d",
        f"deepspeed.extra.{rng.choice(['zero_optimization', 'comms_logger', 'x'])}.{rng.choice(values.WORDS)}",
        f"data.domain_weights.{rng.choice([*values.WORDS, 'en', 'ja', ''])}",
        rng.choice(values.MAD),
        values.soup(rng),
    ]
    name = rng.choice(strange)
    return rng.choice([f"{sign}{name}={values.text(entry.hint, rng)}", f"{sign}{name}", f"{sign}{name}=", f"={name}"])


def _argv(rng: random.Random) -> list[str]:
    words = [_override(rng) for _ in range(rng.choice([1, 1, 1, 2, 3, 6]))]
    if rng.random() < 0.3:  # so that what comes after the data is reached, too
        words += ["data.path=null", "model.vocab_size=4096"]
    if rng.random() < 0.04:
        words.append(
            rng.choice(["-m", "--multirun", "--config-dir=/", "--local_rank=x", "--json=.", rng.choice(values.MAD)])
        )
    rng.shuffle(words)
    # At the end, lest an override is taken for the name of a file to write.
    return [
        *words,
        *rng.choice([[]] * 20 + [["--json"], ["--json", "no/such/plan.json"], ["--json", "a\0b"]]),
        "--dry-run",
    ]


def _cases(seed: int, count: float) -> Iterator[list[str]]:
    for number in range(int(count * FACTOR)):
        yield _argv(random.Random(f"{seed}:{number}"))


@pytest.mark.timeout(60 * FACTOR)
@pytest.mark.parametrize("seed", SEEDS)
def test_training_answers_or_refuses(seed, launch_dir):
    before, there = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, sorted(launch_dir.rglob("*"))
    answered, refused = try_all(pretrain.main, _cases(seed, COUNT), seconds=8)
    assert answered > 0 and refused > answered
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MORE_MEMORY
    assert sorted(launch_dir.rglob("*")) == there, "a plan writes nothing"


@pytest.mark.timeout(60 * FACTOR)
def test_branch_train_merge_answers_or_refuses():
    def cases() -> Iterator[list[str]]:
        for number in range(int(100 * FACTOR)):
            rng = random.Random(f"btm:{number}")
            keys = [key for key in KEYS if key.startswith("btm.")]
            words = [f"{key}={values.text(KEYS[key].hint, rng)}" for key in rng.sample(keys, rng.choice([1, 1, 2, 4]))]
            words += rng.choice([[], [], ["btm=random"], ["btm=cluster"], ["btm.mix_share=0.1"], [_override(rng)]])
            yield [*words, "train.global_batch_size=16", "--dry-run"]

    answered, refused = try_all(btm.main, cases(), seconds=5)
    assert answered > 0 and refused > 0


NAMES = ["2023", "null", "1e5", "true", "1.10", "0x10", "007", "1_000", "nan", "no", "2024-01-02", "-1"]


def test_any_name_of_a_domain_is_a_name(tmp_path, capsys):
    """Numbers, truth values and null as names of domains, wherever names are written."""
    write_dataset(tmp_path / "names", tokens=dict.fromkeys(NAMES, 100_000))
    weights = "{" + ",".join(f"{name}:1" for name in NAMES) + "}"
    for words in ([f"data.domain_weights={weights}"], [f"data.domain_weights.{name}=1" for name in NAMES]):
        assert pretrain.compose(words).data.domain_weights == dict.fromkeys(NAMES, 1.0)
    assert pretrain.main(["data.path=names", f"data.domain_weights={weights}", "--dry-run"]) == 0, (
        capsys.readouterr().err
    )
    words = [
        "data.path=names",
        f"btm.only=[{','.join(NAMES)}]",
        "train.global_batch_size=96",
        "train.micro_batch_size=4",
    ]
    assert btm.main([*words, "--dry-run"]) == 0, capsys.readouterr().err
