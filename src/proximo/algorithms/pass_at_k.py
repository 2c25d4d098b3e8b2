"""Estimates the probability that one of k samples solves a task, from at least k samples."""

from math import comb


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the share of all sets of k samples in which one is right (arXiv:2107.03374, eq. 1).

    Unbiased for the chance that k fresh samples hold a right one, unlike 1 - (1 - c / n)^k, which is too low. Exact in
    integers until the division. Raises ValueError for fewer samples than k.
    """
    if not 0 <= num_solved <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(
            f"pass@k wants 1 <= k <= samples and 0 <= solved <= samples, got {k=}, {num_samples=}, {num_solved=}"
        )
    return 1 - comb(num_samples - num_solved, k) / comb(num_samples, k)
