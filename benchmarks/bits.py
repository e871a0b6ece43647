"""One digest of 600 results, by mode, element type, layout and option, and one of their plans.

usage: python benchmarks/bits.py [--list FILE]

Run it before and after a change that must change no bit. The digests depend on the CPU's units and on NumPy's BLAS
(float64), so only those of one machine compare. FILE gets a line for each result, by which two runs are compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import lowprec

CALLS = 600
#: Each of these is as frequent as its number of entries.
DTYPES = (
    *(
        "float32",
        "float32",
        "float32",
        "float32",
        "bfloat16",
        "float16",
        "complex64",
        "float64",
        "int8",
    ),
    *("complex128", "float8_e4m3fn", "float8_e5m2"),
)
RECIPES = ("mxfp8(scale_rule=rceil)", "mxfp8/mxfp8_e5m2", "nvfp4(hadamard=16, seed=3)")
LAYOUTS = (
    "rows",
    "columns",
    "strided",
    "stack",
    "shared",
    "broadcast",
    "vectors",
    "reversed",
    "one row",
    "empty",
)
OPTIONS: tuple[dict[str, Any], ...] = (
    *(
        {},
        {},
        {"alpha": 0.5},
        {"beta": 2.0},
        {"bias": True},
        {"activation": "relu"},
        {"activation": "gelu"},
    ),
    *(
        {"out": True},
        {"out_dtype": "float32"},
        {"out_dtype": "bfloat16"},
        {"k_chunk": 64},
        {"prepared": True},
    ),
    *(
        {"alpha": -2.0, "beta": 1.0, "bias": True, "out": True},
        {"quantized": "mxfp8"},
        {"quantized": "int8"},
    ),
    *(
        {"quantized": "mxfp4"},
        {"quantized": "nvfp4"},
        {"quantized": "int4"},
        {"rtol": 1e-3},
        {"alpha": 0.0},
    ),
)
DEVICES = ("cpu", "a100", "h200", "b200")


def array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    numbers = rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6, shape)
    if dtype == "int8":
        return np.clip(numbers, -127, 127).astype(np.int8)
    if dtype.startswith("complex"):
        numbers = numbers + 1j * rng.standard_normal(shape)
    return numbers.astype(getattr(ml_dtypes, dtype, dtype))


def operands(rng: np.random.Generator, layout: str, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a, shape (..., m, k), and b, shape (..., k, n), in one of the layouts."""
    m, n, k = (int(size) for size in rng.choice((3, 16, 17, 64, 96, 130, 300), 3))
    if layout == "one row":
        m = 1
    if layout == "empty":
        k = 0
    if layout == "vectors":
        return array(rng, (k,), dtype), array(rng, (k,), dtype)
    batch_a, batch_b = {
        "stack": ((2,), (2,)),
        "shared": ((3,), ()),
        "broadcast": ((2, 1), (3,)),
    }.get(layout, ((), ()))
    if layout == "columns":
        return array(rng, (k, m), dtype).T, array(rng, (n, k), dtype).T
    if layout == "strided":
        return array(rng, (m, 2 * k), dtype)[:, ::2], array(rng, (2 * k, 3 * n), dtype)[::2, ::3]
    a, b = array(rng, (*batch_a, m, k), dtype), array(rng, (*batch_b, k, n), dtype)
    return (a[::-1], b[:, ::-1]) if layout == "reversed" else (a, b)


def keywords(
    rng: np.random.Generator, options: dict[str, Any], a: Any, b: Any, dtype: str
) -> dict[str, Any]:
    shape = np.matmul(
        np.broadcast_to(np.float32(0), a.shape), np.broadcast_to(np.float32(0), b.shape)
    ).shape
    result = {
        name: value
        for name, value in options.items()
        if name not in ("prepared", "quantized", "out", "bias")
    }
    added = "float32" if dtype.startswith("float8") else dtype
    if "beta" in options and shape:
        result["c"] = array(rng, shape, added)
    if "bias" in options and b.ndim > 1:
        result["bias"] = array(rng, shape[-1:], added)
    if "out" in options:
        result["out"] = np.zeros(
            shape, "int32" if dtype == "int8" else getattr(ml_dtypes, added, added)
        )
    return result


def second_operand(b: np.ndarray, options: dict[str, Any], mode: str) -> Any:
    if "prepared" in options:
        return lowprec.prepare(b, math_mode=mode)
    if "quantized" in options:
        return lowprec.quantize(
            b.real.astype("float32"), options["quantized"], axis=-min(2, b.ndim)
        )
    return b


def words(function: Callable[..., Any], *arguments: Any, **options: Any) -> bytes:
    """Return the bits of a function's result, or the text of its error."""
    try:
        x = np.asarray(function(*arguments, **options))
    except lowprec.LowprecError as error:
        return f"{type(error).__name__}: {error}".encode()
    return f"{x.dtype} {x.shape} ".encode() + x.tobytes()


def plan_words(a: Any, b: Any, device: str, arguments: dict[str, Any]) -> bytes:
    try:
        planned = lowprec.plan(a, b, device=device, **arguments)
    except lowprec.LowprecError as error:
        return f"{type(error).__name__}: {error}".encode()
    return f"{planned}\n{planned!r}\n{json.dumps(planned.to_dict(), sort_keys=True)}".encode()


def calls() -> Iterator[tuple[str, bytes, bytes]]:
    """Yield the name of each call, the bits of its result, and its plans on the devices."""
    modes = (*(str(mode) for mode in lowprec.MathMode), *RECIPES)
    for number in range(CALLS):
        rng = np.random.default_rng(number)
        mode = modes[number % len(modes)]
        dtype = str(rng.choice(DTYPES))
        layout = str(rng.choice(LAYOUTS))
        options = OPTIONS[int(rng.integers(len(OPTIONS)))]
        if dtype == "int8" and number % 4:
            options = {}
        name = f"{number} {mode} {dtype} {layout} {options}"
        a, b = operands(rng, layout, dtype)
        arguments = keywords(rng, options, a, b, dtype)
        if "rtol" not in options:
            arguments["math_mode"] = mode
        b = second_operand(b, options, mode)
        plans = b"".join(plan_words(a, b, device, arguments) for device in DEVICES)
        yield name, words(lowprec.matmul, a, b, **arguments), plans


CONTRACTIONS = (
    *(
        "ij,jk->ik",
        "bij,bjk->bik",
        "ij,jk,kl->il",
        "ii->i",
        "ij->j",
        "ij,kj->ik",
        "i,i->",
        "i,j->ij",
        "bij,bkj->bik",
    ),
    *("...ij,...jk->...ik", "ij,ij->", "ijk,jil->kl", "ab,bc,cd,de->ae", "iij,jk->ik", "ij,jk->k"),
)


def contractions() -> Iterator[tuple[str, bytes, bytes]]:
    """Yield the same for einsum, tensordot, vecdot, linear and narrow codes; they have no plans."""
    rng = np.random.default_rng(CALLS)
    for dtype in ("float32", "bfloat16", "complex64", "int8"):
        for subscripts in CONTRACTIONS:
            terms = subscripts.split("->")[0].split(",")
            arrays = [
                array(rng, tuple(6 for _ in term.replace("...", "x")), dtype) for term in terms
            ]
            yield (
                f"{subscripts} {dtype}",
                words(lowprec.einsum, subscripts, *arrays, math_mode="tf32"),
                b"",
            )
        x, y = array(rng, (5, 6, 7), dtype), array(rng, (5, 6, 7), dtype)
        yield (
            f"tensordot {dtype}",
            words(lowprec.tensordot, x, y, ((0, 1), (0, 1)), math_mode="bf16x3"),
            b"",
        )
        yield f"vecdot {dtype}", words(lowprec.vecdot, x, y, axis=-2, math_mode="bf16"), b""
        yield f"linear {dtype}", words(lowprec.linear, x, y[0], math_mode="tf32"), b""
    numbers = array(rng, (40, 70), "float32")
    for dtype in ("float32", "float64", "bfloat16"):
        for name in ("fp8", "fp8_rows", "mxfp8", "mxfp4", "nvfp4", "int8", "int4"):
            x = numbers.astype(getattr(ml_dtypes, dtype, dtype))
            yield f"{name} {dtype}", words(lowprec.quantize(x, name, axis=0).dequantize), b""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--list", type=Path, metavar="FILE", help="for a line per result")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    results, plans, lines = hashlib.sha256(), hashlib.sha256(), []
    for source in (calls, contractions):
        for name, bits, planned in source():
            results.update(bits)
            plans.update(planned)
            digests = [hashlib.sha256(each).hexdigest()[:12] for each in (bits, planned)]
            is_error = bits.split(b":")[0].isalpha()
            lines.append(
                f"{' '.join(digests)} {name}{' raises ' + bits.decode() if is_error else ''}"
            )
    if arguments.list:
        arguments.list.write_text("\n".join(lines) + "\n")
    raised = sum(" raises " in line for line in lines)
    digests = f"results {results.hexdigest()[:16]}, plans {plans.hexdigest()[:16]}"
    print(f"{len(lines)} calls, of which {raised} raise: {digests}")


if __name__ == "__main__":
    main()
