"""Statistics of a matrix of cosines: the effective number of directions, and which vectors cluster."""

from __future__ import annotations

import torch
from scipy.cluster.hierarchy import fcluster, leaves_list, linkage
from scipy.spatial.distance import squareform
from torch import Tensor


def participation_ratio(repeats: Tensor) -> float:
    """Returns (tr C)² / tr C² of the (n, n) matrix C of cosines: n for orthogonal vectors, 1 for parallel ones.

    repeats  (S, n, n), independent unbiased estimates of C, such as S sketches give, with 1 on the diagonal

    Products of different repeats estimate the squares without bias: their noise is independent.
    """
    count, num = repeats.shape[0], repeats.shape[1]
    total, squares = repeats.double().sum(dim=0), repeats.double().square().sum(dim=0)
    off = (total.square() - squares) / (count * (count - 1))
    off.fill_diagonal_(0.0)
    return num**2 / (num + float(off.sum()))


def average_linkage(cosines: Tensor, num_clusters: int) -> tuple[Tensor, Tensor]:
    """Returns (clusters, order), (n,) each: a cluster's number for each vector, and all of them in dendrogram order.

    cosines  (n, n), symmetric; the distance is 1 − cosine, at least 0 where an estimate exceeds 1
    """
    if len(cosines) == 1:
        return torch.ones(1, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    distance = (1.0 - cosines.double()).clamp(min=0.0)
    distance.fill_diagonal_(0.0)
    tree = linkage(squareform(((distance + distance.T) / 2).numpy(), checks=False), method="average")
    clusters = fcluster(tree, min(num_clusters, len(cosines)), criterion="maxclust")
    return torch.from_numpy(clusters).long(), torch.from_numpy(leaves_list(tree)).long()
