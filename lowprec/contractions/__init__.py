"""Contractions that become products: einsum, tensordot, vecdot, linear, conv."""

from lowprec.contractions.convolution import BoundConvolution, conv
from lowprec.contractions.products import einsum, linear, tensordot, vecdot

__all__ = ["BoundConvolution", "conv", "einsum", "linear", "tensordot", "vecdot"]
