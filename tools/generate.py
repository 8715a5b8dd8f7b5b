"""Continue a prompt with a trained model, token by token, as text on standard output.

CHECKPOINT is a run folder (its newest complete checkpoint), its checkpoints folder or one step_*. Ends at the
end-of-document token or after --max-new-tokens. The model sees the last model.seq_length tokens; each new token is one
forward pass over all of them: there is no cache of keys and values, which models of laptop size do not need.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import secrets
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.arguments import Parser, file_path, integer, number, refuse, unicode_text

if TYPE_CHECKING:
    import torch

    from recipes.checkpoint.format import Checkpoint
    from recipes.data.tokenizer import Tokenizer
    from recipes.model.gpt import GPT

_INVALID = "\N{REPLACEMENT CHARACTER}"  # what decoders give for bytes that are not (yet) a character
_EPILOG = """examples:
  python -m tools.generate outputs/dense --prompt "The history of"
  python -m tools.generate outputs/dense --prompt "吾輩は" --greedy --max-new-tokens 100
  python -m tools.generate outputs/dense/checkpoints/step_00000200 --seed 1 --temperature 1 --top-k 0 --top-p 0.9
"""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. ValueError for values out of range.

    temperature: divides the logits; 0 always takes the most likely token. top_k: only that many most likely tokens;
    0: all. top_p: of those, the fewest whose probabilities sum to at least this (Holtzman et al. 2020, arXiv
    1904.09751, sec. 3.1).
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"--temperature {self.temperature}: must be finite and at least 0; try 0.8, or --greedy")
        if self.top_k < 0:
            raise ValueError(f"--top-k {self.top_k}: must be at least 1, or 0 for all tokens; try 50")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p}: must be above 0 and at most 1 (all tokens); try 0.95")


def next_token_probabilities(logits_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distribution that the next token is drawn from: fp64 [V] on the CPU. Of equal logits the lower id is first.

    Raises ValueError for logits that are not finite.
    """
    import torch

    logits_V = logits_V.detach().double().cpu()
    if not logits_V.isfinite().all():
        raise ValueError("the model's output is not finite: its training diverged; take an earlier checkpoint")
    ordered_V, ids_V = logits_V.sort(descending=True, stable=True)
    kept = 1 if sampling.temperature == 0 else min(sampling.top_k or len(logits_V), len(logits_V))
    ordered_K = ordered_V[:kept] - ordered_V[0]
    probabilities_K = (ordered_K / (sampling.temperature or 1.0)).softmax(0)
    if sampling.top_p < 1:
        before_K = probabilities_K.cumsum(0) - probabilities_K
        probabilities_K[before_K >= sampling.top_p] = 0.0
    probabilities_V = torch.zeros_like(logits_V)
    probabilities_V[ids_V[:kept]] = probabilities_K / probabilities_K.sum()
    return probabilities_V


def generate(
    model: GPT, prompt: Sequence[int], tokenizer: Tokenizer, sampling: Sampling, max_new_tokens: int, seed: int
) -> Iterator[int]:
    """New ids after those of the prompt (empty: the start of a document), up to and with the end-of-document id."""
    import torch

    eod = tokenizer.require_eod()
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt) or [eod]
    for _ in range(max_new_tokens):
        logits_V = _next_logits(model, ids, eod)[: tokenizer.vocab_size]
        probabilities_V = next_token_probabilities(logits_V, sampling)
        ids.append(int(torch.multinomial(probabilities_V, 1, generator=generator)))
        yield ids[-1]
        if ids[-1] == eod:
            return


def _next_logits(model: GPT, ids: Sequence[int], eod: int) -> torch.Tensor:
    """Logits [V] after the last `model.seq_length` ids, with the positions and the attention mask of training."""
    import numpy as np
    import torch

    from recipes.train.batch import logit_inputs, model_inputs

    config, device = model.config, next(model.parameters()).device
    window = ids[-config.model.seq_length :]
    inputs = model_inputs(np.array([[*window, eod]]), eod, config.data, device)  # the last id is only a label, unused
    with torch.inference_mode():
        logits_SBV = model.logits(**logit_inputs(inputs))
    return logits_SBV[-1, 0]


def stream_text(tokenizer: Tokenizer, prompt: Sequence[int], new_ids: Iterable[int]) -> Iterator[str]:
    """Text of `new_ids` after the prompt's, piece by piece as it becomes final: a character whose bytes are spread over
    several tokens waits for the last of them, and is left out if that never comes."""
    ids, shown = list(prompt), len(tokenizer.decode(prompt))
    for new_id in new_ids:
        ids.append(new_id)
        text = tokenizer.decode(ids).rstrip(_INVALID)
        if len(text) > shown:
            yield text[shown:]
            shown = len(text)


def for_terminal(text: str) -> str:
    """`text` without control characters, which could reprogram a terminal; line ends and tabs stay."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else _INVALID for c in text)


def _tokenizer(path: Path | None, checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that the model was trained with; ValueError when it is not there or another one."""
    from recipes.checkpoint.model import run_folder
    from recipes.data.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(path or run_folder(checkpoint))
    except ValueError as error:
        raise ValueError(f"{error}; give the model's tokenizer by --tokenizer PATH") from error
    expected = checkpoint.trainer.get("tokenizer")
    if tokenizer.fingerprint != expected:
        raise ValueError(
            f"{tokenizer.path}: has fingerprint {tokenizer.fingerprint[:12]}, {checkpoint.path} was trained with "
            f"{str(expected)[:12]}; give the model's tokenizer by --tokenizer PATH"
        )
    return tokenizer


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "python -m tools.generate",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "checkpoint", type=file_path, metavar="CHECKPOINT", help="run folder, its checkpoints, or one step_*"
    )
    parser.add_argument(
        "--prompt", type=unicode_text, default="", help="text to continue (default: none, a new document)"
    )
    parser.add_argument("--max-new-tokens", type=integer(1), default=64, metavar="N", help="(default: 64)")
    draw = parser.add_mutually_exclusive_group()
    draw.add_argument(
        "--temperature", type=number(0.0, 1e6), default=0.8, metavar="T", help="0: as --greedy (default: 0.8)"
    )
    draw.add_argument("--greedy", action="store_true", help="always the most likely token")
    parser.add_argument(
        "--top-k", type=integer(0), default=50, metavar="K", help="of the K most likely; 0: all (default: 50)"
    )
    parser.add_argument(
        "--top-p",
        type=number(0.0, 1.0, above=True),
        default=1.0,
        metavar="P",
        help="of this share of probability (default: 1)",
    )
    parser.add_argument(
        "--seed", type=integer(0, 2**63 - 1), metavar="N", help="for the same text again (default: another every time)"
    )
    parser.add_argument(
        "--tokenizer", type=file_path, metavar="PATH", help="its file or folder (default: the run folder)"
    )
    parser.add_argument("--json", type=file_path, metavar="FILE", help="write prompt, text, ids and settings here")
    return parser


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    from rich.console import Console

    sampling = Sampling(0.0 if arguments.greedy else arguments.temperature, arguments.top_k, arguments.top_p)
    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed {seed}: must be at least 0 and below 2^63")
    if arguments.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {arguments.max_new_tokens}: must be at least 1")
    notes = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    with notes.status("opening the model") if notes.is_terminal else contextlib.nullcontext():
        from recipes.btm.model import open_model

        model, _, checkpoint = open_model(arguments.checkpoint, say=notes.print)
        tokenizer = _tokenizer(arguments.tokenizer, checkpoint)
    notes.print(f"{checkpoint.path}, seed {seed}")
    prompt = tokenizer.encode(arguments.prompt)
    new_ids: list[int] = []

    def watched() -> Iterator[int]:
        for new_id in generate(model, prompt, tokenizer, sampling, arguments.max_new_tokens, seed):
            new_ids.append(new_id)
            yield new_id

    text = ""
    _show(arguments.prompt)
    for piece in stream_text(tokenizer, prompt, watched()):
        text += piece
        _show(piece)
    _show("\n")
    return {
        "checkpoint": str(checkpoint.path),
        "step": checkpoint.step,
        "prompt": arguments.prompt,
        "text": text,
        "ids": new_ids,
        "ended": new_ids[-1] == tokenizer.eod,
        "seed": seed,
        **asdict(sampling),
    }


def _show(text: str) -> None:
    sys.stdout.write(for_terminal(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 on bad input; 130 when interrupted."""
    arguments = _parser().parse_args(argv)
    try:
        results = _run(arguments)
        if arguments.json:
            from recipes.telemetry.summary import write_json

            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            write_json(arguments.json, results)
    except KeyboardInterrupt:
        print()
        return 130
    except (ValueError, OSError) as error:
        return refuse(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
