"""PyTorch's matrix product operators: their terms for lowprec, or the reason to leave them to PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowprec.formats import DType
from lowprec.modes import TABLE
from lowprec.torch.interception_report import PassedBy

#: Element types on which each mode acts.
ACTED_ON = {r.mode: frozenset(getattr(torch, d.label) for d in DType if r.acts(d)) for r in TABLE}


class Terms(NamedTuple):
    """An operator's result as ``alpha * a @ b + beta * c``."""

    a: Tensor
    b: Tensor
    c: Tensor | None = None
    alpha: Any = 1
    beta: Any = 1


def _added(c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Terms:
    return Terms(a, b, c, alpha, beta)


def _summed(c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Terms:
    return Terms(a.transpose(0, 1).flatten(1), b.flatten(0, 1), c, alpha, beta)


#: By operator name: the terms, and the numbers of axes of both factors. In-place and ``out=`` overloads share them.
_PRODUCTS: dict[str, tuple[Callable[..., Terms], tuple[int, int]]] = {
    "mm": (Terms, (2, 2)),
    "bmm": (Terms, (3, 3)),
    "mv": (Terms, (2, 1)),
    "dot": (Terms, (1, 1)),
    "vdot": (lambda a, b: Terms(a.conj(), b), (1, 1)),
    "addmm": (_added, (2, 2)),
    "baddbmm": (_added, (3, 3)),
    "addmv": (_added, (2, 1)),
    "addbmm": (_summed, (2, 2)),
}

#: Name prefixes of operators that multiply internally and are left to PyTorch.
_OTHERS: dict[PassedBy, str] = {
    PassedBy.ATTENTION: (
        "_scaled_dot_product_ _flash_attention_ _efficient_attention_ _cudnn_attention_ "
        "_transformer_encoder_layer_fwd _native_multi_head_attention _triton_scaled_dot_attention "
        "_triton_multi_head_attention"
    ),
    PassedBy.CONVOLUTION: (
        "convolution _convolution cudnn_convolution miopen_convolution mkldnn_convolution slow_conv "
        "_slow_conv thnn_conv conv_depthwise _conv_depthwise"
    ),
    PassedBy.RECURRENT: "mkldnn_rnn_layer _cudnn_rnn miopen_rnn lstm_mps _lstm_mps",
    PassedBy.FUSED: (
        "_cdist_forward _cdist_backward _trilinear addr _addmm_activation _scaled_mm "
        "_scaled_grouped_mm _grouped_mm _int_mm _weight_int _dyn_quant_matmul mkldnn_linear "
        "_linear_pointwise _mkl_linear _sparse_semi_structured _cslt_sparse_mm sspaddmm hspmm _spdiags"
    ),
    PassedBy.LINEAR_ALGEBRA: (
        "_linalg_det _linalg_eigh _linalg_slogdet _linalg_solve _linalg_svd linalg_cholesky linalg_eig "
        "linalg_householder_product linalg_inv linalg_ldl linalg_lstsq linalg_lu linalg_matrix_exp "
        "linalg_pinv linalg_qr linalg_solve cholesky geqrf lu_unpack ormqr triangular_solve"
    ),
}


#: Operators on a tensor's state, not its elements; PyTorch lists them as composite too.
_ON_STATE = (
    *("_backward", "_fw_primal", "_make_dual", "_version", "data", "is_leaf", "output_nr"),
    *("requires_grad_", "retain_grad", "retains_grad", "set_data"),
)


class Rule(NamedTuple):
    """The handling of an overload."""

    name: str  # without the underscore of in-place operators
    #: From the operator's arguments; None where PyTorch computes or decomposes it.
    terms: Callable[..., Terms] | None = None
    axes: tuple[int, int] = (0, 0)  # of the factors
    passed_by: PassedBy | None = None  # the reason why PyTorch computes it
    in_place: bool = False  # the first argument receives the result
    decomposes: bool = False  # PyTorch decomposes it into other operators

    def accepts(self, terms: Terms, out: Tensor | None) -> bool:
        """Whether PyTorch's operator accepts these arguments; it broadcasts and casts less than lowprec."""
        a, b, c = terms.a, terms.b, terms.c
        alike = all(x.dtype == a.dtype for x in (b, c, out) if x is not None)
        if not alike or (a.ndim, b.ndim) != self.axes or a.shape[:-2] != b.shape[:-2]:
            return False
        out_shape = (*a.shape[:-1], *b.shape[-1:][: b.ndim - 1])
        return not self.in_place or c is None or c.shape == out_shape


@functools.cache
def rule_of(operator: Any) -> Rule | None:
    """Return the handling of an overload, None if it does not multiply."""
    name: str = operator._opname
    in_place = name.endswith("_") and name[:-1] in _PRODUCTS
    base = name[:-1] if in_place else name
    if operator.namespace == "aten" and base in _PRODUCTS and "dtype" not in operator._overloadname:
        return Rule(base, *_PRODUCTS[base], in_place=in_place)
    if name not in _ON_STATE and torch._C._dispatch_has_kernel_for_dispatch_key(
        operator.name(), "CompositeImplicitAutograd"
    ):
        return Rule(name, decomposes=True)
    for reason, prefixes in _OTHERS.items():
        if name.startswith(tuple(prefixes.split())):
            return Rule(name, passed_by=reason)
    return None
