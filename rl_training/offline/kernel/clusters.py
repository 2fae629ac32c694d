"""Statistics of a matrix of cosines: the effective number of directions, and clusters of vectors."""

from __future__ import annotations

import torch
from scipy.cluster.hierarchy import fcluster, leaves_list, linkage
from scipy.spatial.distance import squareform
from torch import Tensor


def participation_ratio(repeats: Tensor) -> float:
    """Return the participation ratio (tr C)² / tr C² of a matrix C of cosines.

    It is n for n orthogonal vectors and 1 for parallel ones. The square of an entry is estimated by products of
    different repeats, which have independent noise, so the sum of squares is unbiased.

    Args:
        repeats: Independent unbiased estimates of C, for example from S sketches: (S, n, n), with 1 on the diagonal.
    """
    count = repeats.shape[0]
    num = repeats.shape[1]
    total = repeats.double().sum(dim=0)
    squares = repeats.double().square().sum(dim=0)
    off_diagonal = (total.square() - squares) / (count * (count - 1))
    off_diagonal.fill_diagonal_(0.0)
    return num**2 / (num + float(off_diagonal.sum()))


def average_linkage(cosines: Tensor, num_clusters: int) -> tuple[Tensor, Tensor]:
    """Cluster vectors by average linkage of the distance 1 − cosine.

    Args:
        cosines: Cosines of all pairs, (n, n), symmetric. Estimates above 1 count as distance 0.
        num_clusters: The largest number of clusters to form.

    Returns:
        The cluster number of each vector, from 1, and the vectors' indices in dendrogram order, both (n,).
    """
    if len(cosines) == 1:
        return torch.ones(1, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    distance = (1.0 - cosines.double()).clamp(min=0.0)
    distance.fill_diagonal_(0.0)
    tree = linkage(squareform(((distance + distance.T) / 2).numpy(), checks=False), method="average")
    clusters = fcluster(tree, min(num_clusters, len(cosines)), criterion="maxclust")
    return torch.from_numpy(clusters).long(), torch.from_numpy(leaves_list(tree)).long()
