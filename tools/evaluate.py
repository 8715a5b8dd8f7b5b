"""Held-out loss of a trained model per domain: nats per token, perplexity, and bits per byte of text.

CHECKPOINT is a run folder (its newest complete checkpoint), its checkpoints folder or one step_*. By default the same
samples as in training: the first train.eval_samples of the valid split of each domain of data.path. Bytes are those of the
raw text, counted when it was indexed: whatever a tokenizer normalises or loses, they are the same for all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recipes.config import Config, DataConfig
from recipes.data.dataset import DatasetInfo, load_dataset
from recipes.data.loader import EvalBatch, EvalSet
from tools.arguments import Parser, file_path, integer, refuse

if TYPE_CHECKING:
    from recipes.checkpoint.format import Checkpoint
    from recipes.model.gpt import GPT

_EPILOG = """examples:
  python -m tools.evaluate outputs/dense
  python -m tools.evaluate outputs/dense --split test --samples 1000 --json report/test.json
  python -m tools.evaluate outputs/dense/checkpoints/step_00000200 --data data/indexed
"""


@dataclass(frozen=True)
class Score:
    """`nll`: nats per token that counts, of `tokens`, which are `num_bytes` bytes of the raw text (None: not counted)."""

    domain: str
    samples: int
    tokens: int
    num_bytes: int | None
    nll: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll) if self.nll < 700 else math.inf  # exp overflows a double near 709.8

    @property
    def bits_per_byte(self) -> float | None:
        """A loss that does not depend on the tokenizer; end-of-document tokens cost bits and are no bytes."""
        return self.nll * self.tokens / math.log(2) / self.num_bytes if self.num_bytes else None

    def row(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {**vars(self), "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}


@dataclass(frozen=True)
class _WatchedSet(EvalSet):
    """An EvalSet that reports each batch when it is done."""

    done: Callable[[], object] = lambda: None

    def __iter__(self) -> Iterator[EvalBatch]:
        for batch in super().__iter__():
            yield batch
            self.done()


def open_data(folder: Path | None, config: Config, checkpoint: Checkpoint) -> DatasetInfo:
    """The data set in `folder` (None: the run's own), which must be in the ids of the model's tokenizer."""
    if folder is None and config.data.path is None:
        raise ValueError("the run has no data.path; give indexed text by --data FOLDER")
    try:
        dataset = load_dataset(folder or str(config.data.path))
    except ValueError as error:
        if folder is not None:
            raise
        raise ValueError(f"data.path={config.data.path} of the run: {error}; or give --data FOLDER") from error
    expected = checkpoint.trainer.get("tokenizer")
    if dataset.tokenizer_fingerprint != expected:
        raise ValueError(
            f"{dataset.folder}: written with tokenizer {dataset.tokenizer_fingerprint[:12]}, {checkpoint.path} was "
            f"trained with {str(expected)[:12]}; index the text with the model's tokenizer"
        )
    if dataset.vocab_size > (config.model.vocab_size or 0):
        raise ValueError(
            f"{dataset.folder}: its vocabulary has {dataset.vocab_size} tokens, that of {checkpoint.path} "
            f"{config.model.vocab_size}; index the text with the model's tokenizer"
        )
    return dataset


def open_sets(
    dataset: DatasetInfo,
    split: str,
    config: Config,
    samples: int | None,
    batch_size: int | None,
    done: Callable[[], object] = lambda: None,
) -> dict[str, EvalSet]:
    """What to evaluate, by domain; None means as in the run. ValueError when the split is too small for one sample."""
    for option, value in (("--samples", samples), ("--batch-size", batch_size)):
        if value is not None and value < 1:
            raise ValueError(f"{option} {value}: must be at least 1")
    seq_length, wanted = config.model.seq_length, samples or config.train.eval_samples
    if not wanted:
        raise ValueError("train.eval_samples=0: the run was not evaluated; say how many samples by --samples N")
    sets: dict[str, EvalSet] = {}
    for domain in dataset.domains:
        source = dataset.open(domain, split)
        found = _WatchedSet(source, seq_length, wanted, batch_size or config.train.micro_batch_size, done=done)
        if found.num_used:
            sets[domain] = found
    if not sets:
        raise ValueError(f"{dataset.folder}: no domain's {split} split has {seq_length + 1} tokens; use another split")
    return sets


def size(eval_set: EvalSet, eod: int, data: DataConfig, text_bytes_D: np.ndarray | None) -> tuple[int, int | None]:
    """Labels that count in an evaluation, and the bytes of their text, given those of each document (None: not counted).

    A document's bytes are spread evenly over its tokens but the EOD, so that only documents which are not labels from end
    to end (the first and the last of the samples; with eod_mask_loss all, by one token) are estimated.
    """
    offsets_D1, length = eval_set.source.offsets, eval_set.num_used * eval_set.seq_length
    ids, labels = eval_set.source.ids[:length], eval_set.source.ids[1 : length + 1]
    counts = ids != eod if data.eod_mask_loss else np.ones(length, bool)
    if text_bytes_D is None:
        return int(counts.sum()), None
    positions = 1 + np.flatnonzero(counts & (labels != eod))
    seen_D = np.bincount(np.searchsorted(offsets_D1, positions, side="right") - 1, minlength=len(text_bytes_D))
    share_D = seen_D / np.maximum(1, np.diff(offsets_D1) - 1)
    return int(counts.sum()), round(float(text_bytes_D @ share_D))


def score(
    model: GPT, sets: Mapping[str, EvalSet], eod: int, data: DataConfig, text_bytes: Mapping[str, np.ndarray | None]
) -> list[Score]:
    """The score of each domain, then that of all together under "all"; `text_bytes`: of each document, by domain.

    Raises ValueError for a loss that is not finite.
    """
    from recipes.train.evaluate import evaluate

    losses = evaluate(model, sets, eod, data)
    if wrong := [domain for domain in sets if not math.isfinite(losses[domain])]:
        why = f"the loss of {wrong[0]} is {losses[wrong[0]]}: its training has diverged, take an earlier checkpoint"
        raise ValueError(why)
    scores = []
    for domain, eval_set in sets.items():
        tokens, num_bytes = size(eval_set, eod, data, text_bytes[domain])
        scores.append(Score(domain, eval_set.num_used, tokens, num_bytes, losses[domain]))
    known = [s.num_bytes for s in scores if s.num_bytes is not None]
    num_bytes = sum(known) if len(known) == len(scores) else None
    total = Score("all", sum(s.samples for s in scores), sum(s.tokens for s in scores), num_bytes, losses[""])
    return [*scores, total]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "python -m tools.evaluate",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "checkpoint", type=file_path, metavar="CHECKPOINT", help="run folder, its checkpoints, or one step_*"
    )
    parser.add_argument("--data", type=file_path, metavar="FOLDER", help="indexed text (default: data.path of the run)")
    parser.add_argument("--split", choices=("valid", "test"), default="valid", help="(default: valid)")
    parser.add_argument(
        "--samples", type=integer(1), metavar="N", help="sequences per domain (default: train.eval_samples)"
    )
    parser.add_argument(
        "--batch-size", type=integer(1, 2**24), metavar="N", help="sequences at once (default: train.micro_batch_size)"
    )
    parser.add_argument("--json", type=file_path, metavar="FILE", help="write the results here")
    return parser


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    notes = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    with notes.status("opening the model") if notes.is_terminal else contextlib.nullcontext():
        from recipes.btm.model import open_model

        model, config, checkpoint = open_model(arguments.checkpoint, say=notes.print)
    dataset = open_data(arguments.data, config, checkpoint)
    columns = (TextColumn("evaluating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notes, disable=not notes.is_terminal, transient=True) as progress:
        task = progress.add_task("evaluating", total=None)
        sets = open_sets(
            dataset, arguments.split, config, arguments.samples, arguments.batch_size, lambda: progress.advance(task)
        )
        progress.update(task, total=sum(map(len, sets.values())))
        for note in filter(None, (eval_set.note for eval_set in sets.values())):
            notes.print(note)
        if dataset.note is not None:
            notes.print(dataset.note)
        text_bytes = {domain: dataset.text_bytes(domain, arguments.split) for domain in sets}
        if unknown := [domain for domain, counts in text_bytes.items() if counts is None]:
            notes.print(
                f"no bits per byte of {', '.join(unknown)}: {dataset.folder} was written without the sizes of its text; "
                "index it again with `python -m tools.index --overwrite`"
            )
        try:
            *scores, total = score(model, sets, dataset.eod, config.data, text_bytes)
        except ValueError as error:
            raise ValueError(f"{checkpoint.path}: {error}") from error
    _print_table(f"{arguments.split} split of {dataset.folder} after step {checkpoint.step}", [*scores, total])
    return {
        "checkpoint": str(checkpoint.path),
        "step": checkpoint.step,
        "data": str(dataset.folder),
        "split": arguments.split,
        "seq_length": config.model.seq_length,
        "rows": [s.row() for s in scores],
        "all": total.row(),
    }


def _print_table(title: str, scores: Sequence[Score]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("domain", title=Text(title), title_justify="left")
    for header in ("samples", "nll (nats/token)", "perplexity", "bits/byte"):
        table.add_column(header, justify="right")
    for s in scores:
        bits = "" if s.bits_per_byte is None else f"{s.bits_per_byte:.4f}"
        table.add_row(Text(s.domain), f"{s.samples:,}", f"{s.nll:.4f}", f"{s.perplexity:.2f}", bits)
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 on bad input."""
    arguments = _parser().parse_args(argv)
    try:
        results = _run(arguments)
        if arguments.json:
            from recipes.telemetry.summary import write_json

            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            write_json(arguments.json, results)
    except (ValueError, OSError) as error:
        return refuse(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
