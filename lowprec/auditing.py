"""``audit``: the precision of float32 operations of the loaded libraries, as their results show it.

Each probe is a product with an identity, so that a result has the bits of one rounded operand, at several sizes,
because some libraries use TF32 only for large extents. Another product shows whether sums are accumulated in FP32.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from lowprec import plotting
from lowprec.errors import BackendError, SettingError, quoted
from lowprec.policy import environment
from lowprec.policy.controllers import controllers
from lowprec.policy.protocol import attempt
from lowprec.report import Report
from lowprec.util.tables import Table
from lowprec.util.tracing import uncompiled

#: Precisions, the lowest first; "fp16 sums" rounds sums to 16 bits.
PRECISIONS = ("fp16 sums", "bf16", "fp16", "tf32", "split", "fp32")
LIBRARIES = ("torch", "jax", "numpy", "cupy")
SIZES = (16, 512, 1024)

# TF32 and float16 have 10 bits after the point, bfloat16 has 7, and two parts of bfloat16 have 16, which are too few
# for the first number. The last one is zero in float16.
_PROBES = (1 + 2.0**-9 + 2.0**-23, 1 + 2.0**-12, 1 + 2.0**-10, 1 + 2.0**-7, 2.0**-30)
_VALUES = np.array(_PROBES, np.float32)
#: The precision by which of these numbers are unchanged.
_UNCHANGED: dict[tuple[bool, ...], str] = {
    (True, True, True, True, True): "fp32",
    (False, True, True, True, True): "split",
    (False, False, True, True, True): "tf32",
    (False, False, True, True, False): "fp16",
    (False, False, False, True, True): "bf16",
}
#: A number whose sums with 1 need more than 11 bits, and fit in 24.
_SMALL = 2.0**-12

_VARIABLES = {
    "torch": ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    "jax": ("NVIDIA_TF32_OVERRIDE", "JAX_DEFAULT_MATMUL_PRECISION", "XLA_FLAGS"),
    "cupy": ("NVIDIA_TF32_OVERRIDE", "CUPY_TF32"),
}


@dataclass(frozen=True, slots=True)
class AuditRow:
    """The precision of one operation of a library on a device.

    >>> import lowprec
    >>> lowprec.audit(libraries=["numpy"], sizes=[16]).rows[0].precision
    'fp32'
    """

    library: str
    device: str
    operation: str
    size: int  #: Extents of the matrices, or channels.
    #: One of ``"fp32"``, ``"split"`` (parts of 16 bits), ``"tf32"``, ``"fp16"``, ``"bf16"``,
    precision: str
    #: ``"fp16 sums"``; ``"unknown"`` if the operation failed.
    detail: str = ""  #: The error message of a failed operation.


@dataclass(frozen=True, slots=True)
class Audit(Report):
    """The result of :func:`audit`; ``print`` shows it as a table.

    >>> import lowprec
    >>> lowprec.audit(libraries=["numpy"], sizes=[16]).below("fp32")
    ()
    """

    rows: tuple[AuditRow, ...]
    #: By library: the switches that are set, and the variables of its environment.
    switches: dict[str, dict[str, str]]

    def below(self, precision: str) -> tuple[AuditRow, ...]:
        """Return the operations whose precision is lower than this one."""
        if precision not in PRECISIONS:
            raise SettingError(f"precision {precision!r} is not one of: {', '.join(PRECISIONS)}")
        lower = PRECISIONS[: PRECISIONS.index(precision)]
        return tuple(r for r in self.rows if r.precision in lower)

    def tables(self) -> list[Table]:
        found: dict[tuple[str, ...], list[str]] = {}
        for r in self.rows:
            size = str(r.size)
            if r.detail:
                size = f"{size} ({r.detail})"
            key = (r.library, r.device, r.operation, r.precision)
            found.setdefault(key, []).append(size)
        rows = [(*key, ", ".join(sizes)) for key, sizes in found.items()]
        columns = ("library", "device", "operation", "precision", "sizes")
        tables = [Table("precision of float32", columns, rows)]
        switches = []
        for library, values in self.switches.items():
            switches += [(library, name, x) for name, x in values.items()]
        if switches:
            columns_of_switches = ("library", "switch", "value")
            tables.append(Table("switches", columns_of_switches, switches))
        return tables

    def figure(self) -> Any:
        names = [f"{r.library} {r.device} {r.operation} {r.size}" for r in self.rows]
        ticks = ("unknown", *PRECISIONS)
        levels = [ticks.index(r.precision) for r in self.rows]
        figure = plotting.bar_figure("precision of float32", names, {"precision": levels}, "")
        figure.axes[0].set_xticks(range(len(ticks)), ticks)
        return figure


@uncompiled
def audit(libraries: Iterable[str] | None = None, sizes: Sequence[int] = SIZES) -> Audit:
    """Measure in which precision the loaded libraries compute float32 now.

    Products, linear layers, convolutions, attention and solvers of PyTorch, JAX, NumPy and CuPy are run on each of
    their devices. The bits of the results distinguish FP32, TF32, float16, bfloat16, operands split into parts, and
    sums in 16 bits. No switch is changed.

    Parameters
    ----------
    libraries : list of str, optional
        Of ``"torch"``, ``"jax"``, ``"numpy"``, ``"cupy"``; they are imported. By default those that are loaded.
    sizes : sequence of int
        Extents of the operands, at least 5. Some kernels use TF32 only for large ones.

    Returns
    -------
    Audit

    Raises
    ------
    SettingError
        A library is unknown, or a size is below 5.

    Examples
    --------
    >>> print(audit(libraries=["numpy"], sizes=[16]))
    precision of float32
      library  device  operation  precision  sizes
      numpy    cpu     matmul     fp32       16
      numpy    cpu     dot        fp32       16
      numpy    cpu     solve      fp32       16
    """
    names = [name for name in LIBRARIES if name in sys.modules]
    if libraries is not None:
        names = list(libraries)
    unknown = [name for name in names if name not in LIBRARIES]
    if unknown:
        raise SettingError(f"no audit of {', '.join(unknown)}; choose among {', '.join(LIBRARIES)}")
    if min(sizes, default=0) < len(_VALUES):
        raise SettingError(f"sizes must be at least {len(_VALUES)}, got {quoted(sizes)}")
    rows: list[AuditRow] = []
    switches = {}
    for name in names:
        rows += _rows(name, sizes)
        found = _switches(name)
        if found:
            switches[name] = found
    return Audit(tuple(rows), switches)


def verify() -> None:
    """Raise BackendError if a float32 operation of a loaded library is below FP32; for ``fp32_guard(verify=True)``."""
    low = audit(sizes=(512,)).below("fp32")
    if low:
        texts = [f"{r.library}'s {r.operation} on {r.device} ({r.precision})" for r in low]
        raise BackendError(f"inside fp32_guard these are not in full FP32: {', '.join(texts)}")


def _switches(name: str) -> dict[str, str]:
    found = environment.variables_set(_VARIABLES.get(name, ()))
    for controller in controllers():
        if controller.name == name:
            values, error = attempt(controller, controller.describe)
            values = values or {"switches": error}
            found |= {key: str(x) for key, x in values.items()}
    return found


def _rows(name: str, sizes: Sequence[int]) -> Iterator[AuditRow]:
    library = importlib.import_module(name)
    for device, operations in _DEVICES[name](library):
        for (operation, run), size in product(operations.items(), sizes):
            detail = ""
            try:
                precision = measure(run, size)
            except Exception as error:  # noqa: BLE001 - an operation that a device lacks is reported
                precision = "unknown"
                message = str(error).splitlines()[0][:80]
                detail = f"{type(error).__name__}: {message}"
            yield AuditRow(name, device, operation, size, precision, detail)


#: Computes ``a @ b`` of NumPy arrays by an operation of a library.
Operation = Callable[[Any, Any], Any]


def measure(run: Operation, size: int) -> str:
    """Return the precision of an operation, from its results for matrices of this size."""
    few = np.full((size, size), _SMALL, np.float32)
    few[:, 0] = 1
    ones = np.ones((size, size), np.float32)
    total = run(few, ones)[0, 0]
    if total != 1 + (size - 1) * _SMALL:
        return PRECISIONS[0]
    identity = np.eye(size, dtype=np.float32)
    row = np.resize(_VALUES, size)
    x = np.tile(row, (size, 1))
    found = [_precision_of(run(x, identity)), _precision_of(run(identity, x))]
    return min(found, key=PRECISIONS.index)


def _precision_of(result: Any) -> str:
    """Return the precision of a product of the probes and an identity."""
    count = len(_VALUES)
    unchanged = []
    for i, value in enumerate(_VALUES):
        column = result[:, i::count]
        unchanged.append(bool(np.all(column == value)))
    return _UNCHANGED.get(tuple(unchanged), PRECISIONS[0])


# -- operations -----------------------------------------------------------------------------------

Operations = dict[str, Operation]
_TOKENS = 64  # tokens and channels of attention
_SHARP = 1e4  # scale by which its weights are 0 and 1


def _blocks(a: Any, b: Any) -> tuple[Any, Any]:
    """Return a system whose solution starts with ``-a @ b``, the update of a block in an LU decomposition."""
    n = len(a)
    matrix = np.eye(2 * n, dtype=np.float32)
    matrix[:n, n:] = a
    right = np.zeros((2 * n, n), np.float32)
    right[n:] = b
    return matrix, right


def _solved(solve: Operation, a: Any, b: Any) -> Any:
    matrix, right = _blocks(a, b)
    solution = np.asarray(solve(matrix, right))
    return -solution[: len(a)]


def _attended(attend: Operation, a: Any, b: Any) -> Any:
    """Return a product by attention, whose weights are 0 and 1; a product of other numbers is not attention's."""
    if not np.array_equal(a, np.eye(len(a))):
        return a @ b
    n = min(len(a), _TOKENS)
    weights = np.eye(n, dtype=np.float32)
    values = np.ascontiguousarray(b[:n, :n])
    return attend(weights, values)


def _of_torch(torch: Any) -> Iterator[tuple[str, Operations]]:
    functional = torch.nn.functional

    def linear(a: Any, b: Any) -> Any:
        bias = torch.zeros_like(b[0])
        return functional.linear(a, b.T, bias)

    def convolve(a: Any, b: Any) -> Any:
        channels = functional.conv2d(_pixels(a), _pixels(b.T))
        return channels[..., 0, 0]

    def attend(x: Any, v: Any) -> Any:
        q = x[None, None]
        v = v[None, None]
        values = functional.scaled_dot_product_attention(q, q, v, scale=_SHARP)
        return values[0, 0]

    def on(device: str, call: Operation, a: Any, b: Any) -> Any:
        x = torch.tensor(a, device=device)
        y = torch.tensor(b, device=device)
        with torch.no_grad():
            return call(x, y).cpu().numpy()

    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    for device in ("cpu", *gpus):
        run = partial(partial, on, device)
        operations: Operations = {
            "matmul": run(torch.matmul),
            "linear": run(linear),
            "convolution": run(convolve),
            "attention": partial(_attended, run(attend)),
            "solve": partial(_solved, run(torch.linalg.solve)),
        }
        yield device, operations


def _pixels(x: Any) -> Any:
    return x[..., None, None]


def _of_jax(jax: Any) -> Iterator[tuple[str, Operations]]:
    def convolve(a: Any, b: Any) -> Any:
        channels = jax.lax.conv(_pixels(a), _pixels(b.T), (1, 1), "VALID")
        return channels[..., 0, 0]

    def attend(x: Any, v: Any) -> Any:
        q = x[None, :, None]
        v = v[None, :, None]
        values = jax.nn.dot_product_attention(q, q, v, scale=_SHARP)
        return values[0, :, 0]

    def on(device: Any, call: Operation, a: Any, b: Any) -> Any:
        x = jax.device_put(a, device)
        y = jax.device_put(b, device)
        return np.asarray(call(x, y))

    devices = jax.local_devices()
    if jax.default_backend() != "cpu":
        devices = [*devices, *jax.local_devices(backend="cpu")]
    for device in devices:
        run = partial(partial, on, device)
        operations: Operations = {
            "matmul": run(jax.numpy.matmul),
            "attention": partial(_attended, run(attend)),
            "convolution": run(convolve),
            "solve": partial(_solved, run(jax.numpy.linalg.solve)),
        }
        yield str(device), operations


def _of_numpy(numpy: Any) -> Iterator[tuple[str, Operations]]:
    operations: Operations = {
        "matmul": numpy.matmul,
        "dot": numpy.dot,
        "solve": partial(_solved, numpy.linalg.solve),
    }
    yield "cpu", operations


def _of_cupy(cupy: Any) -> Iterator[tuple[str, Operations]]:
    def on(number: int, call: Operation, a: Any, b: Any) -> Any:
        with cupy.cuda.Device(number):
            x = cupy.asarray(a)
            y = cupy.asarray(b)
            return cupy.asnumpy(call(x, y))

    for number in range(cupy.cuda.runtime.getDeviceCount()):
        run = partial(partial, on, number)
        operations: Operations = {
            "matmul": run(cupy.matmul),
            "solve": partial(_solved, run(cupy.linalg.solve)),
        }
        yield f"cuda:{number}", operations


_DEVICES = {"torch": _of_torch, "jax": _of_jax, "numpy": _of_numpy, "cupy": _of_cupy}
