"""PyTorch's operators that multiply: the terms of matrix products, and the reason to leave the others to PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowprec.core.interception_report import PassedBy
from lowprec.formats import DType
from lowprec.modes import TABLE
from lowprec.planning.problem import broadcasts

#: Element types on which each mode acts.
ACTED_ON = {r.mode: frozenset(getattr(torch, d.label) for d in DType if r.acts(d)) for r in TABLE}


class Terms(NamedTuple):
    """An operator's result as ``activation(alpha * a @ b + beta * c)``."""

    a: Tensor
    b: Tensor
    c: Any = None
    alpha: Any = 1
    beta: Any = 0
    activation: Callable[[Tensor], Tensor] | None = None

    def is_accepted(self, axes: tuple[int, int], out: Tensor | None, in_place: bool) -> bool:
        """Whether PyTorch's operator accepts these arguments; else it raises its error."""
        a = self.a
        b = self.b
        c = self.c
        if (
            (a.ndim, b.ndim) != axes
            or a.shape[-1] != b.shape[-2:][0]
            or a.shape[:-2] != b.shape[:-2]
        ):
            return False
        for x in (b, c, out):
            if x is not None and (x.dtype != a.dtype or x.device != a.device):
                return False
        if c is None:
            return True
        shape = (*a.shape[:-1], *b.shape[1:][-1:])
        if in_place:
            return c.shape == shape
        return broadcasts(c.shape, shape)


def _added(c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Terms:
    return Terms(a, b, c, alpha, beta)


def _activated(*tensors: Tensor, use_gelu: bool = False, **factors: Any) -> Terms:
    return _added(*tensors, **factors)._replace(activation=_gelu if use_gelu else torch.relu_)


def _gelu(x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_.default(x, approximate="tanh" if x.is_cuda else "none")


class AtenProduct(NamedTuple):
    """The terms of an operator, from its arguments, and the numbers of axes of both factors."""

    terms: Callable[..., Terms]
    axes: tuple[int, int]
    overloads: tuple[str, ...]


_FUNCTIONAL = ("", ".out")
_ALL = ("", "_", ".out")
#: By operator name. ``matmul``, ``linear``, ``mv``, ``addbmm``, ``einsum``, ``cdist`` and others are made of these.
PRODUCTS = {
    "mm": AtenProduct(Terms, (2, 2), _FUNCTIONAL),
    "bmm": AtenProduct(Terms, (3, 3), _FUNCTIONAL),
    "dot": AtenProduct(Terms, (1, 1), ("",)),
    "vdot": AtenProduct(lambda a, b: Terms(a.conj(), b), (1, 1), ("",)),
    "addmm": AtenProduct(_added, (2, 2), _ALL),
    "baddbmm": AtenProduct(_added, (3, 3), _ALL),
    "addmv": AtenProduct(_added, (2, 1), _ALL),
    "_addmm_activation": AtenProduct(_activated, (2, 2), _FUNCTIONAL),
}

#: The operators on the CPU of which lowprec computes the products. Those for 1 to 3 axes, transposed ones and second
#: derivatives are made of them.
CONVOLUTIONS = ("aten::convolution", "aten::_convolution", "aten::convolution_backward")

#: The operators of attention of which lowprec computes the products.
ATTENTIONS = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
)

#: The operator of LSTM layers on the CPU, which is replaced above autograd, and below it for inference mode.
LSTM = "aten::mkldnn_rnn_layer"

#: Name prefixes of operators that multiply internally and are left to PyTorch, in the namespaces below.
_OTHERS: dict[PassedBy, str] = {
    PassedBy.ATTENTION: (
        "_scaled_dot_product_ _flash_attention_ _efficient_attention_ _cudnn_attention_ "
        "_triton_scaled_dot_attention _triton_multi_head_attention"
    ),
    PassedBy.CONVOLUTION: (
        "convolution _convolution cudnn_convolution miopen_convolution mkldnn_convolution slow_conv "
        "_slow_conv thnn_conv conv_ conv1d conv2d conv3d _conv_depthwise qconv"
    ),
    PassedBy.RECURRENT: "mkldnn_rnn_layer _cudnn_rnn miopen_rnn quantized_lstm quantized_gru quantized_rnn",
    PassedBy.FUSED: (
        "mm.dtype bmm.dtype addmm.dtype baddbmm.dtype _trilinear addr _scaled_mm _scaled_grouped_mm "
        "_grouped_mm _int_mm _weight_int _dyn_quant_matmul mkldnn_linear _linear_pointwise _mkl_linear "
        "_sparse_semi_structured _cslt_sparse_mm sspaddmm hspmm _sparse_mm _sparse_sparse _sparse_addmm "
        "sparse_sampled linear qlinear matmul _mixed_dtypes_linear _fused_linear linear_cross_entropy"
    ),
    PassedBy.LINEAR_ALGEBRA: (
        "_linalg_det _linalg_eig _linalg_slogdet _linalg_solve _linalg_svd linalg_cholesky_ex linalg_eig "
        "linalg_householder_product linalg_inv_ex linalg_ldl linalg_lstsq linalg_lu linalg_pinv linalg_qr "
        "linalg_solve_tri "
        "cholesky geqrf ormqr triangular_solve"
    ),
}
_NAMESPACES = (
    "aten",
    "quantized",
    "_quantized",
    "onednn",
    "mkldnn",
    "mkl",
    "mkldnn_prepacked",
    "sparse",
)
_DENSE = ("CPU", "CUDA")
_COMPOSITES = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_STORAGES = (
    "SparseCPU",
    "SparseCUDA",
    "SparseCsrCPU",
    "SparseCsrCUDA",
    "QuantizedCPU",
    "MkldnnCPU",
)
_NOT_PRODUCTS = (
    "prepack",
    "unpack",
    "reorder",
    "_cholesky_solve_helper",
    "linear_backward",
    "matmul_backward",
)


class Kernel(NamedTuple):
    """A kernel of PyTorch's that an interception replaces."""

    operator: str  # with its namespace and overload
    key: str  # of the dispatcher
    name: str  # without namespace, overload, and the underscore of in-place operators
    product: AtenProduct | None = None
    in_place: bool = False  # the first argument receives the result
    passed_by: PassedBy | None = None


def reason_of(operator: str) -> PassedBy | None:
    """Return the reason why PyTorch computes an operator that multiplies; None for all others."""
    if any(part in operator for part in _NOT_PRODUCTS):
        return None
    for reason, prefixes in _OTHERS.items():
        if operator.startswith(tuple(prefixes.split())):
            return reason
    return None


#: The keys of composites in this build of PyTorch.
_BUILT = ("CPU", "MkldnnCPU", *(["CUDA"] if torch.version.cuda else []))
CASTS = tuple(Kernel("aten::_to_copy", key, "_to_copy") for key in _BUILT)


@functools.cache
def kernels() -> tuple[Kernel, ...]:
    """Return the kernels of this build of PyTorch and its loaded libraries."""
    return tuple(_kernels())


def _kernels() -> Iterator[Kernel]:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name, product in PRODUCTS.items():
        for overload in product.overloads:
            operator = f"aten::{name}{overload}"
            for key in _DENSE:
                if has(operator, key):
                    yield Kernel(operator, key, name, product, overload == "_")
            for key in _STORAGES:
                if has(operator, key):
                    yield Kernel(operator, key, name, passed_by=PassedBy.STORAGE)
    if has(LSTM, "CPU"):
        yield Kernel(LSTM, "AutogradCPU", "mkldnn_rnn_layer")
    for operator in sorted(torch._C._dispatch_get_all_op_names()):
        space, _, rest = operator.partition("::")
        if space not in _NAMESPACES:
            continue
        name, _, overload = rest.partition(".")
        reason = reason_of(rest)
        # Autograd differentiates through composites. The operators that they call are replaced instead.
        if reason is None or has(operator, "CompositeImplicitAutograd"):
            continue
        is_composite = any(has(operator, key) for key in _COMPOSITES) and "out" not in overload
        for key in (*_DENSE, *_STORAGES):
            if has(operator, key) or (is_composite and key in _BUILT):
                yield Kernel(operator, key, name.removesuffix("_"), passed_by=reason)


def multiplications_of(operator: str, args: Any, kwargs: Any, result: Any) -> int:
    """Return the number of multiplications of an operator, 0 if it is unknown."""
    from torch.utils.flop_counter import flop_registry

    space, _, name = operator.partition("::")
    name = name.partition(".")[0].replace("_for_cpu", "")
    formula = flop_registry.get(getattr(getattr(torch.ops, space), name, None))
    if "rnn_layer" in name:
        x, *weights = args[:3]
        products = 1 + ("backward" in name)
        return products * x.shape[:-1].numel() * sum(w.numel() for w in weights)
    if formula is None:
        return 0
    try:
        return int(formula(*args, **kwargs, out_val=result)) // 2
    except Exception:  # noqa: BLE001 - a formula for other arguments; the count is information
        return 0
