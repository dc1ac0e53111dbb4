"""MAUVE: how close the distribution of generated text is to that of human text (Pillutla et al., 2021).

Both sets of embeddings are quantized together by k-means. Between the two histograms P and Q lies a curve of
divergences (KL(Q|R), KL(P|R)) to their mixtures R; MAUVE is the area under its exponential, 1 for equal distributions
and towards 0 for disjoint ones.

S texts, D width, K clusters.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headstock.intervals import Interval, jackknife_interval

MIXTURES = 25  # points of the divergence curve
SCALING = 5.0  # c of the paper
EXPLAINED_VARIANCE = 0.9  # kept by the principal components
TEXTS_PER_CLUSTER = 10


@dataclass(frozen=True)
class QuantizedTexts:
    """The cluster of every text of both sets."""

    p: np.ndarray  # (S,) of human texts
    q: np.ndarray  # (S,) of generated texts
    clusters: int

    def interval(self) -> Interval:
        """MAUVE with its interval; the clusters stay when texts are left out."""
        return jackknife_interval(self.mauve, self.p.tolist(), self.q.tolist(), bounds=(0.0, 1.0))

    def mauve(self, p: Sequence[int], q: Sequence[int]) -> float:
        return mauve_of_histograms(self.histogram(p), self.histogram(q))

    def histogram(self, labels: Sequence[int]) -> np.ndarray:
        counts = np.bincount(labels, minlength=self.clusters)
        return counts / max(1, counts.sum())


def quantize(human: np.ndarray, generated: np.ndarray, *, clusters: int | None = None, seed: int = 0) -> QuantizedTexts:
    """Both sets of embeddings (S, D) in one set of clusters, by default one per ten texts of the smaller set."""
    from sklearn.cluster import KMeans
    from sklearn.decomposition import PCA

    count = clusters or max(2, round(min(len(human), len(generated)) / TEXTS_PER_CLUSTER))
    vectors = np.concatenate([human, generated]).astype(np.float64)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    count = min(count, len(np.unique(vectors, axis=0)))
    vectors = PCA(n_components=EXPLAINED_VARIANCE, svd_solver="full").fit_transform(vectors)
    labels = KMeans(count, n_init=5, max_iter=500, random_state=seed).fit_predict(vectors)
    return QuantizedTexts(labels[: len(human)], labels[len(human) :], count)


def mauve_of_histograms(p: np.ndarray, q: np.ndarray, *, scaling: float = SCALING) -> float:
    """The area under the divergence curve of two histograms, averaged over its two orientations."""
    weights = np.linspace(1e-6, 1 - 1e-6, MIXTURES)
    points = [(kl(q, w * p + (1 - w) * q), kl(p, w * p + (1 - w) * q)) for w in weights]
    curve = np.exp(-scaling * np.array([(np.inf, 0.0), *points, (0.0, np.inf)]))
    return float(np.mean([_area(curve[:, 0], curve[:, 1]), _area(curve[:, 1], curve[:, 0])]))


def _area(x: np.ndarray, y: np.ndarray) -> float:
    order = np.argsort(x, kind="stable")
    return float(np.trapezoid(y[order], x[order]))


def kl(p: np.ndarray, q: np.ndarray) -> float:
    """The Kullback-Leibler divergence in nats; infinite where q lacks what p has."""
    used = p > 0
    if (q[used] == 0).any():
        return float("inf")
    return float((p[used] * np.log(p[used] / q[used])).sum())


def mauve(human: Sequence[np.ndarray] | np.ndarray, generated: Sequence[np.ndarray] | np.ndarray) -> Interval:
    """MAUVE of embeddings with its interval."""
    return quantize(np.asarray(human), np.asarray(generated)).interval()
