"""PyTorch's own samples of its operators (OpInfo), inside the block and outside of it.

Started as ``torch_opinfo.py DTYPE...``. It compares results, gradients, arguments changed in place, strides, errors,
warnings and every kind of ``out=``, prints the differences, and in the last line the number of comparisons.
"""

import itertools
import random
import sys
import types
import unittest
import warnings
from collections import Counter
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

import lowprec.torch as lt

#: Operators that are products or made of them, of which more samples are compared, and others that use products inside.
PRODUCTS = (
    "mm addmm baddbmm bmm matmul __rmatmul__ nn.functional.linear einsum tensordot nn.functional.bilinear cdist "
    "matrix_exp addbmm addmv mv dot vdot inner kron outer ger addr linalg.multi_dot linalg.matrix_power linalg.vecdot "
    "nn.functional.scaled_dot_product_attention cov corrcoef pca_lowrank svd_lowrank nn.functional.conv1d "
    "nn.functional.conv2d nn.functional.conv3d nn.functional.conv_transpose1d nn.functional.conv_transpose2d "
    "nn.functional.conv_transpose3d linalg.householder_product ormqr"
)
OTHERS = (
    "chain_matmul nn.functional.multi_head_attention_forward cholesky_inverse cholesky_solve "
    "nn.functional.cosine_similarity pdist nn.functional.embedding_bag sparse.mm sparse.sampled_addmm "
    "nn.functional.unfold nn.functional.fold stft istft triangular_solve geqrf cross nn.functional.ctc_loss "
    "logdet cholesky nn.functional.affine_grid lu lu_solve nn.functional.grid_sample trapezoid polar block_diag"
)
SAMPLES = {True: 20, False: 6}
#: Relative to the largest element: sums of at most some hundred products in another order, differentiated.
TOLERANCE = {"float32": 2e-4, "complex64": 2e-4, "float16": 5e-3, "bfloat16": 4e-2}
#: The directions of small singular values are arbitrary.
UNCOMPARED_VALUES = {"svd_lowrank", "pca_lowrank"}
#: PyTorch conjugates lazily here, and its ``Tensor.is_conj`` shows it.
LAZY = {"vdot"}


def operators():
    stub = types.ModuleType("expecttest")  # needed by PyTorch's own tests
    stub.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", stub)
    from torch.testing._internal.common_methods_invocations import op_db

    names = f"{PRODUCTS} {OTHERS}".split()
    return [op for op in op_db if op.name in names or op.name.startswith("linalg.")]


class Outcome(NamedTuple):
    """What a call did."""

    error: tuple[str, str] | None
    warned: frozenset[tuple[str, str]]
    tensors: dict[str, list[Any]]


def copied(x):
    """Return a copy with the same strides, overlaps included, in memory of its own."""
    if not isinstance(x, torch.Tensor):
        return x
    detached = x.detach()
    if x.layout != torch.strided:
        return detached.clone().requires_grad_(x.requires_grad)
    storage = detached.untyped_storage().clone()
    made = torch.empty(0, dtype=x.dtype).set_(storage, x.storage_offset(), x.size(), x.stride())
    made = torch._conj(made) if x.is_conj() else made
    made = torch._neg_view(made) if x.is_neg() else made
    return made.requires_grad_(x.requires_grad)


def tensors_of(x):
    return [t for t in tree_leaves(x) if isinstance(t, torch.Tensor)]


def gradients(sample, found, arguments):
    outs = [t for t in tensors_of(sample.output_process_fn_grad(found)) if t.requires_grad]
    ins = [t for t in tensors_of(arguments) if t.requires_grad]
    if not outs or not ins:
        return []
    seeds = [
        torch.randn(t.shape, generator=torch.Generator().manual_seed(i)).to(t.dtype)
        for i, t in enumerate(outs)
    ]
    return list(torch.autograd.grad(outs, ins, seeds, allow_unused=True))


def call(function, sample, mode, records=False, out=None):
    """Call a function with copies of a sample's arguments, inside a block if there is a mode."""
    arguments = tree_map(copied, (sample.input, sample.args, sample.kwargs))
    keywords = arguments[2] if out is None else {**arguments[2], "out": out}
    torch.manual_seed(0)
    random.seed(0)
    error, tensors, block = None, {}, lt.intercept(mode) if mode else nullcontext()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            with block:
                found = function(arguments[0], *arguments[1], **keywords)
                tensors = {"result": tensors_of(found)}
                if records:
                    tensors["gradients"] = gradients(sample, found, arguments)
        except Exception as e:  # noqa: BLE001 - any class is compared
            error = type(e).__name__, str(e)
    tensors["arguments"] = tensors_of((arguments, out))
    # Shapes in PyTorch's warning of a resized out depend on how often it is resized.
    return Outcome(
        error, frozenset((w.category.__name__, str(w.message)[:50]) for w in warned), tensors
    )


def described(x, is_lazy):
    if x is None:
        return None
    strided = (x.stride(), x.storage_offset()) if x.layout == torch.strided else None
    return tuple(x.shape), strided, x.dtype, is_lazy or x.is_conj(), x.is_neg(), x.requires_grad


def close(x, y, tolerance):
    x, y = (t.detach() for t in (x, y))
    x, y = (t.to_dense() if t.layout != torch.strided else t for t in (x, y))
    if not (x.is_floating_point() or x.is_complex()):
        return torch.equal(x, y)
    tolerance = max(tolerance, TOLERANCE.get(str(x.dtype).removeprefix("torch."), 0))
    finite = x.abs()[torch.isfinite(x.abs())].double()
    largest = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(y, x, rtol=tolerance, atol=tolerance * max(largest, 1e-3), equal_nan=True)


def differences(name, plain, taken, tolerance):
    """Return the kinds of differences; values are compared if there is a tolerance."""
    if plain.error or taken.error:
        return [] if plain.error == taken.error else [("error", plain.error, taken.error)]
    found = (
        [] if plain.warned == taken.warned else [("warnings", set(plain.warned), set(taken.warned))]
    )
    for kind, expected in plain.tensors.items():
        pairs = list(zip(expected, taken.tensors[kind], strict=True))
        for x, y in pairs:
            of_x, of_y = (described(t, name in LAZY) for t in (x, y))
            if of_x != of_y:
                found.append((kind, of_x, of_y))
            elif x is not None and tolerance and not close(x, y, tolerance):
                found.append((f"values of the {kind}", x, y))
    return found


def outs(x):
    """Return functions that make an ``out=`` of each kind for a result."""
    full = {"dtype": x.dtype, "fill_value": 1}
    other = torch.float32 if x.dtype == torch.float64 else torch.float64
    kinds = {
        "same": lambda: torch.full(x.shape, **full),
        "empty": lambda: torch.empty(0, dtype=x.dtype),
        "resized": lambda: torch.full((*x.shape, 2), **full),
        "another type": lambda: torch.full(x.shape, 1, dtype=other),
        "integers": lambda: torch.full(x.shape, 1, dtype=torch.int64),
    }
    if x.ndim:
        kinds["transposed"] = lambda: torch.full(x.shape[::-1], **full).permute(
            *reversed(range(x.ndim))
        )
        kinds["strided"] = lambda: torch.full((*x.shape[:-1], 2 * max(1, x.shape[-1])), **full)[
            ..., ::2
        ][..., : x.shape[-1]]
    if x.is_complex():
        kinds["conjugated"] = lambda: torch.full(x.shape, **full).conj()
    if x.is_floating_point():
        kinds["a leaf"] = lambda: torch.full(x.shape, **full).requires_grad_()
    return kinds


def detached(sample):
    x, args, kwargs = tree_map(
        lambda t: t.detach() if isinstance(t, torch.Tensor) else t,
        (sample.input, sample.args, sample.kwargs),
    )
    return type(sample)(x, args=args, kwargs=kwargs)


def cases(op, dtype):
    """Yield labels, functions from a mode to the outcome, and whether values are compared."""
    records = dtype in op.supported_backward_dtypes("cpu") and (
        dtype.is_floating_point or dtype.is_complex
    )
    variants = {"function": op.op, "method": op.method_variant, "in place": op.inplace_variant}
    for sample in itertools.islice(
        op.sample_inputs("cpu", dtype, requires_grad=records), SAMPLES[op.name in PRODUCTS.split()]
    ):
        for label, function in variants.items():
            in_place = label == "in place"
            if function is None or (in_place and sample.broadcasts_input):
                continue
            given = detached(sample) if in_place else sample
            yield (
                label,
                lambda mode, f=function, s=given, r=records and not in_place: call(f, s, mode, r),
                True,
            )
        plain = detached(sample)
        result = call(op.op, plain, None).tensors.get("result", ()) if op.supports_out else ()
        if len(result) == 1 and result[0].layout == torch.strided:
            for kind, make in outs(result[0].detach()).items():
                yield (
                    f"out {kind}",
                    lambda mode, s=plain, m=make: call(op.op, s, mode, out=m()),
                    True,
                )
    if dtype == torch.float32 and op.error_inputs_func:
        for case in op.error_inputs("cpu"):
            yield "an error", lambda mode, s=case.sample_input: call(op.op, s, mode), False


def main(names):
    counted, seen = 0, Counter()
    for name in names:
        dtype, tolerance = getattr(torch, name), TOLERANCE.get(name, 1e-9)
        for op in operators():
            if dtype not in op.supported_dtypes("cpu"):
                continue
            for label, run, has_values in cases(op, dtype):
                plain = run(None)
                for mode in ("fp32", "bf16"):
                    counted += 1
                    compares = has_values and mode == "fp32" and op.name not in UNCOMPARED_VALUES
                    for kind, *both in differences(
                        op.name, plain, run(mode), tolerance if compares else 0
                    ):
                        key = f"{op.formatted_name}, {name}, {mode}, {label}, {kind}"
                        seen[key] += 1
                        if seen[key] == 1:
                            sys.stdout.write(
                                " | ".join([key, *(repr(x)[:300] for x in both)]).replace("\n", " ")
                                + "\n"
                            )
    sys.stdout.write(f"{counted}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_warn_always(True)  # also of warnings that PyTorch gives once a process
    main(sys.argv[1:])
