"""Clusters of text without labels, as c-BTM makes them (Gururangan et al. 2023, arXiv 2303.14177, sec. 2 and 3).

    pieces of documents -> tf-idf of words (numbers are one word) -> truncated SVD -> unit length
        -> balanced k-means on a sample: centres, each with an equal share -> Clusters
    text -> Clusters.nearest (which branch is trained on it)  or  Clusters.log_weights (which branches answer for it)

P pieces, F features after the SVD, K clusters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recipes.btm.split import pieces, write_dataset
from recipes.config import BtmConfig
from recipes.data.dataset import DatasetInfo
from recipes.data.tokenizer import Tokenizer
from recipes.files import own_folder, replace_bytes, replace_text

if TYPE_CHECKING:
    from sklearn.feature_extraction.text import TfidfVectorizer

# Runs of letters of any script, single characters of scripts without spaces, and all numbers as one word.
_WORD = r"(?u)<number>|[^\W\d_]+"
_NUMBER = r"\d+(?:[.,]\d+)*"
_NO_SPACES = r"([\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af])"
_MOST_WORDS = 50_000
_ROUNDS = 50  # of balanced k-means at most
_BATCH = 4096  # pieces embedded at once


def normalise_text(text: str) -> str:
    """Lower case; every number is the word <number>; characters of scripts without spaces stand alone."""
    import re

    return re.sub(_NO_SPACES, r" \1 ", re.sub(_NUMBER, "<number>", text.lower()))


def balanced_assignment(distances_PK: np.ndarray) -> np.ndarray:
    """A cluster for each piece with the least sum of distances, no cluster having more than ceil(P / K) pieces: int [P].

    Exact: each cluster is as many columns of an assignment problem as it has places.
    """
    from scipy.optimize import linear_sum_assignment

    pieces, clusters = distances_PK.shape
    places = -(-pieces // clusters)
    _, columns = linear_sum_assignment(np.repeat(distances_PK, places, axis=1))
    return columns // places


def squared_distances(points_PF: np.ndarray, centres_KF: np.ndarray) -> np.ndarray:
    """[P, K]"""
    squares = (points_PF**2).sum(1)[:, None] + (centres_KF**2).sum(1)[None, :]
    return np.maximum(squares - 2 * points_PF @ centres_KF.T, 0)


def balanced_kmeans(points_PF: np.ndarray, clusters: int, seed: int) -> np.ndarray:
    """Centres [K, F] after alternating optimal balanced assignments and means until nothing moves.

    It starts from k-means++ (Arthur and Vassilvitskii 2007). Raises ValueError for fewer points than clusters.
    """
    from sklearn.cluster import kmeans_plusplus

    if len(points_PF) < clusters:
        raise ValueError(f"{len(points_PF)} pieces of text for {clusters} clusters; use fewer branches, or more text")
    centres_KF, _ = kmeans_plusplus(points_PF, clusters, random_state=seed)
    assigned_P = np.full(len(points_PF), -1)
    for _ in range(_ROUNDS):
        now_P = balanced_assignment(squared_distances(points_PF, centres_KF))
        if np.array_equal(now_P, assigned_P):
            break
        assigned_P = now_P
        centres_KF = np.stack([points_PF[assigned_P == cluster].mean(axis=0) for cluster in range(clusters)])
    return centres_KF


def softmax_of_distance(squared_PK: np.ndarray, temperature: float) -> np.ndarray:
    """log softmax(-d^2 / T) over the clusters: [P, K]."""
    scores_PK = -squared_PK / temperature
    scores_PK = scores_PK - scores_PK.max(axis=1, keepdims=True)
    return scores_PK - np.log(np.exp(scores_PK).sum(axis=1, keepdims=True))


@dataclass(frozen=True)
class Clusters:
    """What embeds text, and where the centres are. words: the vocabulary; idf [words]; components [F, words]; centres [K, F]."""

    words: list[str]
    idf: np.ndarray
    components: np.ndarray
    centres: np.ndarray

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Points of unit length, or 0 for text without a known word: [P, F]."""
        from sklearn.preprocessing import normalize

        vectorizer = _vectorizer(self.words)
        vectorizer.idf_ = self.idf
        parts = []
        for begin in range(0, len(texts), _BATCH):
            parts.append(vectorizer.transform(texts[begin : begin + _BATCH]) @ self.components.T)
        return normalize(np.concatenate(parts)) if parts else np.zeros((0, len(self.components)))

    def nearest(self, texts: Sequence[str]) -> np.ndarray:
        """The cluster of the nearest centre: int [P]."""
        return squared_distances(self.embed(texts), self.centres).argmin(axis=1)

    def log_weights(self, texts: Sequence[str], temperature: float) -> np.ndarray:
        """log p(cluster | text) = log softmax(-d^2 / T) (sec. 2.3): [P, K]."""
        return softmax_of_distance(squared_distances(self.embed(texts), self.centres), temperature)

    def save(self, folder: Path) -> None:
        """clusters.json and clusters.safetensors."""
        from safetensors.numpy import save

        own_folder(folder)
        replace_text(folder / "clusters.json", json.dumps({"words": self.words}, ensure_ascii=False) + "\n")
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in ("idf", "components", "centres")}
        replace_bytes(folder / "clusters.safetensors", save(arrays))

    @classmethod
    def load(cls, folder: Path) -> Clusters:
        """Raises ValueError when the files are missing or damaged."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            words = json.loads((folder / "clusters.json").read_text(encoding="utf-8"))["words"]
            return cls(words, **load_file(folder / "clusters.safetensors"))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ValueError(f"{folder}: no clusters, or damaged ones ({error}); run the stage split again") from error


def _vectorizer(words: list[str] | None) -> TfidfVectorizer:
    from sklearn.feature_extraction.text import TfidfVectorizer

    fixed: dict[str, Any] = {"max_features": _MOST_WORDS, "min_df": 2} if words is None else {"vocabulary": words}
    return TfidfVectorizer(preprocessor=normalise_text, token_pattern=_WORD, dtype=np.float64, **fixed)


def fit(texts: Sequence[str], clusters: int, features: int, seed: int) -> Clusters:
    """Clusters of a sample of texts. Raises ValueError for fewer texts than clusters, or texts without common words."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.preprocessing import normalize

    if len(texts) < clusters:
        raise ValueError(
            f"{len(texts)} documents of training text, fewer than the {clusters} clusters; use fewer branches"
        )
    vectorizer = _vectorizer(None)
    try:
        counts = vectorizer.fit_transform(texts)
    except ValueError as error:
        raise ValueError(
            f"no word is in two of {len(texts)} pieces of text, so there is nothing to cluster by ({error})"
        ) from error
    svd = TruncatedSVD(min(features, counts.shape[1] - 1, counts.shape[0] - 1), random_state=seed)
    points_PF = normalize(svd.fit_transform(counts))
    centres_KF = balanced_kmeans(points_PF, clusters, seed)
    return Clusters(vectorizer.get_feature_names_out().tolist(), vectorizer.idf_, svd.components_, centres_KF)


def write_clusters(
    info: DatasetInfo, domains: Sequence[str], count: int, btm: BtmConfig, seed: int, out: Path
) -> list[int]:
    """Cluster the training text of `domains` without their labels; a data set of domains "cluster<k>", and the clusters, in `out`.

    Returns the tokens of each cluster. Raises ValueError for fewer pieces than clusters, and for a cluster without text.
    """
    tokenizer = info.tokenizer()
    ids = [piece for domain in domains for piece in pieces(info.open(domain, "train"), btm.cluster_tokens)]
    texts = [tokenizer.decode(piece.tolist()) for piece in ids]
    order = np.argsort(np.random.Philox(np.random.SeedSequence([seed])).random_raw(len(texts)), kind="stable")
    sample = [texts[index] for index in order[: btm.cluster_sample].tolist()]
    found = fit(sample, count, btm.cluster_features, seed)
    assigned = found.nearest(texts)
    sizes = [int(sum(len(ids[index]) for index in np.flatnonzero(assigned == cluster))) for cluster in range(count)]
    if 0 in sizes:
        raise ValueError(f"cluster {sizes.index(0)} has no text; use fewer branches, or another run.seed")
    names = (f"cluster{cluster}" for cluster in range(count))
    write_dataset(info, ((name, _chosen(ids, assigned == k)) for k, name in enumerate(names)), out)
    found.save(out)
    return sizes


def _chosen(ids: list[np.ndarray], which: np.ndarray) -> Iterable[np.ndarray]:
    return (ids[index] for index in np.flatnonzero(which).tolist())


def route(
    clusters: Clusters, tokens_NS1: np.ndarray, tokenizer: Tokenizer, temperature: float, every: int
) -> np.ndarray:
    """log p(cluster | what lies before) at each position: [K, N, S].

    Decided anew every `every` tokens, from the text of the sequence up to there; uniform before the first decision.
    """
    sequences, length = tokens_NS1.shape[0], tokens_NS1.shape[1] - 1
    starts = list(range(0, length, every))
    texts = [tokenizer.decode(row[: start + 1].tolist()) if start else "" for row in tokens_NS1 for start in starts]
    log_PK = clusters.log_weights(texts, temperature)
    count = log_PK.shape[1]
    log_NTK = log_PK.reshape(sequences, len(starts), count)
    log_NTK[:, 0] = -np.log(count)
    return np.repeat(log_NTK, every, axis=1)[:, :length].transpose(2, 0, 1)
