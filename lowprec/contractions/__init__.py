"""Contractions that become products: einsum, tensordot, vecdot, linear."""

from lowprec.contractions.products import einsum, linear, tensordot, vecdot
from lowprec.contractions.products import multiply_transposed as multiply_transposed

__all__ = ["einsum", "linear", "tensordot", "vecdot"]
