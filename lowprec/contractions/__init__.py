"""Contractions that become products: einsum, tensordot, vecdot, linear."""

from lowprec.contractions.products import einsum, linear, tensordot, vecdot

__all__ = ["einsum", "linear", "tensordot", "vecdot"]
