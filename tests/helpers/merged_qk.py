"""From two projections, of queries and keys, to one merged matrix and back."""

from __future__ import annotations

import torch

from manyheads.parts.core import inverse_root


def merged_weight(query, key, heads):
    """W̃[h] = W_Q[h]ᵀ W_K[h] / √K per head, as the weight of a merged query projection: (H·J)×J from two of (H·K)×J."""
    q_HKJ, k_HKJ = (weight.unflatten(0, (heads, -1)) for weight in (query, key))
    return (k_HKJ.transpose(1, 2) @ q_HKJ * inverse_root(q_HKJ.shape[1])).flatten(0, 1)


def split_weight(merged, heads, size):
    """W_Q and W_K with W_Qᵀ W_K / √K = W̃, by singular value decomposition; an error if the rank of W̃ is above K."""
    w_HJJ = merged.unflatten(0, (heads, -1)).transpose(1, 2)
    left, values, right = torch.linalg.svd(w_HJJ)
    rank = int(torch.linalg.matrix_rank(w_HJJ).max())
    if rank > size:
        raise ValueError(f"a merged matrix of rank {rank} needs heads of size {rank} or more, given {size}")
    root = (values[:, :size] / inverse_root(size)).sqrt()[:, :, None]
    query, key = root * left.transpose(1, 2)[:, :size], root * right[:, :size]
    return query.flatten(0, 1), key.flatten(0, 1)
