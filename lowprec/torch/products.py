"""PyTorch's own operators that multiply matrices: as products of lowprec's, or why they are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowprec.torch.interception_report import PassedBy

#: Element types on which modes act.
ACTED_ON = frozenset((torch.float32, torch.complex64))


class Terms(NamedTuple):
    """An operator's result as ``alpha * a @ b + beta * c``."""

    a: Tensor
    b: Tensor
    c: Tensor | None = None
    alpha: Any = 1
    beta: Any = 1


def _plain(a: Tensor, b: Tensor) -> Terms:
    return Terms(a, b)


def _added(c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Terms:
    return Terms(a, b, c, alpha, beta)


def _summed(c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Terms:
    """Return the sum over a batch as one product with a long inner dimension."""
    a = a.transpose(0, 1).flatten(1)
    return Terms(a, b.flatten(0, 1), c, alpha, beta)


#: By name, in-place forms and those with ``out=`` included: the terms, and how many axes their factors have.
_PRODUCTS: dict[str, tuple[Callable[..., Terms], tuple[int, int]]] = {
    "mm": (_plain, (2, 2)),
    "bmm": (_plain, (3, 3)),
    "mv": (_plain, (2, 1)),
    "dot": (_plain, (1, 1)),
    "vdot": (lambda a, b: Terms(a.conj(), b), (1, 1)),
    "addmm": (_added, (2, 2)),
    "baddbmm": (_added, (3, 3)),
    "addmv": (_added, (2, 1)),
    "addbmm": (_summed, (2, 2)),
}

#: Operators that multiply inside and are left to PyTorch, by beginnings of their names.
_OTHERS: dict[PassedBy, tuple[str, ...]] = {
    why: tuple(names.split())
    for why, names in {
        PassedBy.ATTENTION: (
            "_scaled_dot_product_ _flash_attention_ _efficient_attention_ _cudnn_attention_ "
            "_transformer_encoder_layer_fwd _native_multi_head_attention "
            "_triton_scaled_dot_attention _triton_multi_head_attention"
        ),
        PassedBy.CONVOLUTION: (
            "convolution _convolution cudnn_convolution miopen_convolution mkldnn_convolution "
            "slow_conv _slow_conv thnn_conv conv_depthwise _conv_depthwise"
        ),
        PassedBy.RECURRENT: "mkldnn_rnn_layer _cudnn_rnn miopen_rnn lstm_mps _lstm_mps",
        PassedBy.FUSED: (
            "_cdist_forward _cdist_backward _trilinear addr _addmm_activation _scaled_mm "
            "_scaled_grouped_mm _grouped_mm _int_mm _weight_int _dyn_quant_matmul mkldnn_linear "
            "_linear_pointwise _mkl_linear _sparse_semi_structured _cslt_sparse_mm sspaddmm "
            "hspmm _spdiags"
        ),
        PassedBy.LINEAR_ALGEBRA: (
            "_linalg_det _linalg_eigh _linalg_slogdet _linalg_solve _linalg_svd linalg_cholesky "
            "linalg_eig linalg_householder_product linalg_inv linalg_ldl linalg_lstsq linalg_lu "
            "linalg_matrix_exp linalg_pinv linalg_qr linalg_solve cholesky geqrf lu_unpack "
            "ormqr triangular_solve"
        ),
    }.items()
}


#: About a tensor, not its elements; PyTorch says of them that they are made of other operators.
_OF_A_VARIABLE = frozenset(
    (
        *("_backward", "_fw_primal", "_make_dual", "_version", "data", "is_leaf", "output_nr"),
        *("requires_grad_", "retain_grad", "retains_grad", "set_data"),
    )
)


class Form(NamedTuple):
    """How an overload is served."""

    name: str  # without the underscore of in-place forms
    #: From the operator's arguments; None where it is left to PyTorch or decomposed.
    terms: Callable[..., Terms] | None = None
    axes: tuple[int, int] = (0, 0)  # of the factors
    passed_by: PassedBy | None = None  # why it is left to PyTorch
    in_place: bool = False  # whether the first argument receives the result
    decomposes: bool = False  # whether PyTorch has it in terms of other operators

    def takes(self, terms: Terms, out: Tensor | None) -> bool:
        """Whether PyTorch's operator, which broadcasts and converts less than lowprec, takes these arguments."""
        a, b, c = terms.a, terms.b, terms.c
        alike = all(x.dtype == a.dtype for x in (b, c, out) if x is not None)
        if not alike or (a.ndim, b.ndim) != self.axes or a.shape[:-2] != b.shape[:-2]:
            return False
        out_shape = (*a.shape[:-1], *b.shape[-1:][: b.ndim - 1])
        return not self.in_place or c is None or c.shape == out_shape


_forms: dict[Any, Form | None] = {}


def form_of(operator: Any) -> Form | None:
    """Return how an overload is served, None where it does not multiply."""
    try:
        return _forms[operator]
    except KeyError:
        return _forms.setdefault(operator, _form_of(operator))


def _form_of(operator: Any) -> Form | None:
    name: str = operator._opname
    in_place = name.endswith("_") and name[:-1] in _PRODUCTS
    base = name[:-1] if in_place else name
    if operator.namespace == "aten" and base in _PRODUCTS and "dtype" not in operator._overloadname:
        return Form(base, *_PRODUCTS[base], in_place=in_place)
    if name not in _OF_A_VARIABLE and torch._C._dispatch_has_kernel_for_dispatch_key(
        operator.name(), "CompositeImplicitAutograd"
    ):
        return Form(name, decomposes=True)
    for why, beginnings in _OTHERS.items():
        if name.startswith(beginnings):
            return Form(name, passed_by=why)
    return None
