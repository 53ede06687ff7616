"""Effective rank and spectra of matrices."""

import torch


def singular_values(matrix: torch.Tensor) -> torch.Tensor:
    """[..., rows, columns] -> [..., min(rows, columns)] in fp32, largest first; NaN where a matrix is not finite."""
    matrix = matrix.float()
    finite = matrix.isfinite().all(-1).all(-1)
    values = torch.linalg.svdvals(torch.where(finite[..., None, None], matrix, 0.0))  # which raises for NaN
    return torch.where(finite[..., None], values, torch.nan)


def effective_rank(values: torch.Tensor) -> torch.Tensor:
    """Singular values [..., k] -> [...]: exp of the entropy of the values as shares of their sum (Roy and Vetterli
    2007). Between 1 and the rank; 0 for a matrix of zeros."""
    total = values.sum(-1, keepdim=True)
    shares = values / total.clamp(min=torch.finfo(values.dtype).tiny)
    entropy = -(torch.xlogy(shares, shares)).sum(-1)
    return torch.where(total.squeeze(-1) == 0, torch.zeros_like(entropy), entropy.exp())


def product_singular_values(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The d singular values of left @ right, [..., h, d] and [..., d, h'], without making the product [h, h'].

    left = Q R and right^T = P S with orthonormal columns in Q and P, so the product's singular values are those of
    R S^T [d, d] (Golub and Van Loan, Matrix Computations, section 5.4: they do not change under orthonormal factors).
    """
    first = torch.linalg.qr(left.float(), mode="r").R
    second = torch.linalg.qr(right.float().mT, mode="r").R
    return singular_values(first @ second.mT)
