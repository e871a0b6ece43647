"""Few rows of float32 times a narrow weight by NumPy, PyTorch, ONNX Runtime and lowprec, each as a function of a set.

Weights are prepared before, rows read and rounded in each call. Codes of PyTorch and ONNX Runtime are random, because
their values do not change the time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

import lowprec
from lowprec.backends.cpu import threads

#: A product of the rows with a number and the weight with this number.
Call = Callable[[int], Any]
Calls = dict[str, Call]

GROUP = 32


def use_threads(count: int) -> None:
    """Set the threads of NumPy's OpenBLAS and of PyTorch, which lowprec follows."""
    for path in threads.openblas_paths():
        setter = threads.openblas_function(path, "openblas_set_num_threads")
        if setter is not None:
            setter(count)
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(count)


def all_threads() -> int:
    return min(threads.affinity(), os.cpu_count() or 1)


def of_numpy(rows: list[Any], weights: list[Any]) -> Calls:
    turned = [np.ascontiguousarray(x.T) for x in weights]
    return {
        "numpy, b by columns": lambda i: rows[i] @ weights[i].T,
        "numpy, b by rows": lambda i: rows[i] @ turned[i],
    }


def of_torch(rows: list[Any], weights: list[Any]) -> Calls:
    import torch

    w = [torch.from_numpy(y) for y in weights]
    narrow = [y.bfloat16() for y in w]
    n, k = weights[0].shape
    generator = torch.Generator().manual_seed(0)
    codes = [torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=generator) for _ in w]
    half = [torch.randint(0, 16, (n, k), dtype=torch.int32, generator=generator) for _ in w]
    pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    packed = [pack(y, 1) for y in half]
    scales, of_groups = (
        torch.ones(n, dtype=torch.bfloat16),
        torch.ones((k // GROUP, n, 2), dtype=torch.bfloat16),
    )
    int8, int4 = torch.ops.aten._weight_int8pack_mm, torch.ops.aten._weight_int4pack_mm_for_cpu
    linear = torch.nn.functional.linear

    def x(i: int) -> Any:
        return torch.from_numpy(rows[i])

    return {
        "torch float32": lambda i: linear(x(i), w[i]),
        "torch bfloat16": lambda i: linear(x(i).bfloat16(), narrow[i]).float(),
        "torch _weight_int8pack_mm": lambda i: int8(x(i).bfloat16(), codes[i], scales).float(),
        "torch _weight_int4pack_mm": lambda i: int4(
            x(i).bfloat16(), packed[i], GROUP, of_groups
        ).float(),
    }


def of_onnxruntime(rows: list[Any], weights: list[Any], count: int) -> Calls:
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    n, k = weights[0].shape
    rng = np.random.default_rng(0)
    scales = np.full((n * k // GROUP,), 0.01, np.float32)

    def session(bits: int, level: int) -> Any:
        codes = rng.integers(0, 256, (n, k // GROUP, GROUP * bits // 8), np.uint8)
        node = helper.make_node(
            "MatMulNBits", ["a", "b", "scales"], ["c"], domain="com.microsoft",
            K=k, N=n, bits=bits, block_size=GROUP, accuracy_level=level,
        )  # fmt: skip
        a, c = (
            helper.make_tensor_value_info(x, TensorProto.FLOAT, ["m", size])
            for x, size in (("a", k), ("c", n))
        )
        stored = [numpy_helper.from_array(codes, "b"), numpy_helper.from_array(scales, "scales")]
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(
            helper.make_graph([node], "product", [a], [c], stored), opset_imports=opsets
        )
        model.ir_version = 10
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = count
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    calls: Calls = {}
    for bits in (4, 8):
        for level in (1, 4):
            made = [session(bits, level) for _ in weights]
            name = f"onnxruntime {bits} bits, accuracy_level {level}"
            calls[name] = lambda i, made=made: made[i].run(None, {"a": rows[i]})  # type: ignore[misc]
    return calls


def of_lowprec(rows: list[Any], weights: list[Any]) -> Calls:
    stored: dict[str, tuple[Any, Any]] = {
        "float32": (None, lambda x: x.T),
        "bfloat16": (None, lambda x: x.T.astype(ml_dtypes.bfloat16)),
        **{f"float by {name}": (None, _quantised(name)) for name in ("mxfp8", "fp8_rows", "int8")},
        **{f"float by {name}": (None, _quantised(name)) for name in ("mxfp4", "nvfp4", "int4")},
        **{
            f"int8_blocks by {name}": ("int8_blocks", _quantised(name))
            for name in ("mxfp4", "nvfp4", "int4", "int8")
        },
        **{
            f"mode {name}": (name, lambda x: x.T)
            for name in ("mxfp4", "nvfp4", "int8_blocks", "int8", "mxfp8")
        },
    }
    calls: Calls = {}
    for name, (mode, make) in stored.items():
        kept = None if name.startswith("int8_blocks by") else mode
        prepared = [lowprec.prepare(make(x), math_mode=kept) for x in weights]
        calls[f"lowprec {name}"] = lambda i, mode=mode, w=prepared: lowprec.matmul(
            rows[i], w[i], math_mode=mode
        )
    return calls


def _quantised(name: str) -> Callable[[Any], Any]:
    return lambda x: lowprec.quantize(x, name).T


def all_calls(rows: list[Any], weights: list[Any], count: int) -> Iterator[tuple[str, Calls]]:
    """Yield the calls of each library, none for one that is absent; weights are (n, k)."""
    makers: dict[str, Callable[[], Calls]] = {
        "numpy": lambda: of_numpy(rows, weights),
        "torch": lambda: of_torch(rows, weights),
        "onnxruntime": lambda: of_onnxruntime(rows, weights, count),
        "lowprec": lambda: of_lowprec(rows, weights),
    }
    for name, make in makers.items():
        try:
            yield name, make()
        except ImportError:
            yield name, {}
