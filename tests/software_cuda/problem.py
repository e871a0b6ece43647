"""A product as its descriptors describe it, and the requirements of cuBLASLt."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nvmath.bindings import cublasLt as real

from software_cuda import tables
from software_cuda.emulation import Emulation
from software_cuda.objects import INVALID_VALUE, NOT_SUPPORTED
from software_cuda.recorder import Refusal

_EPILOGUES = frozenset(
    int(real.Epilogue[x]) for x in ("DEFAULT", "RELU", "BIAS", "RELU_BIAS", "GELU", "GELU_BIAS")
)
_BIAS, _RELU, _GELU = 4, 2, 32
_MOST_MATRICES = 65535


@dataclass(frozen=True)
class Matrix:
    """A batch of matrices as a layout describes it; ``ld`` and ``batch_stride`` in elements."""

    name: str
    type: int
    rows: int
    cols: int
    ld: int
    order: int = 0
    batch_count: int = 1
    batch_stride: int = 0

    @property
    def dtype(self):
        return tables.DTYPES[self.type]

    @property
    def bits(self):
        """Bits of an element in memory."""
        return 4 if self.type == tables.R_4F_E2M1 else 8 * self.dtype.itemsize

    @property
    def strides(self):
        """Elements from one matrix, row, column to the next."""
        inner = (1, self.ld) if self.order == real.Order.COL else (self.ld, 1)
        return (self.batch_stride, *inner)

    @property
    def shape(self):
        return (self.batch_count, self.rows, self.cols)

    def span(self):
        """Return the first byte, from the pointer, and the one after the last."""
        ends = [s * (n - 1) for s, n in zip(self.strides, self.shape, strict=True)]
        first, last = sum(min(x, 0) for x in ends), sum(max(x, 0) for x in ends)
        return first * self.bits // 8, -(-(last + 1) * self.bits // 8)

    def alignment(self):
        """Return the alignment in bytes that every column or row has if the first has it."""
        steps = self.ld | (self.batch_stride if self.batch_count > 1 else 0)
        size = steps * self.bits
        return min((size & -size) // 8, 256) if size else 256


@dataclass(frozen=True)
class Problem:
    """One product, with the pointers of its descriptor, 0 for none."""

    a: Matrix
    b: Matrix
    c: Matrix
    d: Matrix
    compute: int
    scale: int
    op_a: int = 0
    op_b: int = 0
    epilogue: int = 1
    bias_pointer: int = 0
    bias_type: int = -1
    bias_batch_stride: int = 0
    a_scale: int = 0
    b_scale: int = 0
    a_mode: int = 0
    b_mode: int = 0
    emulation_descriptor: int = 0
    emulation: Emulation | None = None  # where the device emulates

    @property
    def without_pointers(self):
        """The product for other bias and scales."""
        return replace(self, bias_pointer=0, a_scale=0, b_scale=0, emulation_descriptor=0)

    @property
    def m(self):
        return self.d.rows

    @property
    def n(self):
        return self.d.cols

    @property
    def k(self):
        return self.a.rows if self.op_a else self.a.cols

    @property
    def has_bias(self):
        return bool(self.epilogue & _BIAS)

    @property
    def activation(self):
        return "relu" if self.epilogue & _RELU else "gelu" if self.epilogue & _GELU else ""

    @property
    def is_narrow(self):
        """Whether the operands are FP8 or FP4, which have scales."""
        return self.a.type in tables.FLOAT8 or self.a.type == tables.R_4F_E2M1

    @property
    def signature(self):
        """The properties that an algorithm depends on."""
        types = (self.a.type, self.b.type, self.c.type, self.d.type)
        orders = (self.a.order, self.b.order, self.d.order)
        return (
            self.compute,
            self.scale,
            self.op_a,
            self.op_b,
            self.a_mode,
            self.b_mode,
            *types,
            *orders,
        )


#: Names of the fields by those of the attributes; others are not modelled.
_OF_PROBLEM = {
    "COMPUTE_TYPE": "compute", "SCALE_TYPE": "scale", "TRANSA": "op_a", "TRANSB": "op_b", "EPILOGUE": "epilogue",
    "BIAS_POINTER": "bias_pointer", "BIAS_DATA_TYPE": "bias_type", "BIAS_BATCH_STRIDE": "bias_batch_stride",
    "A_SCALE_POINTER": "a_scale", "B_SCALE_POINTER": "b_scale", "A_SCALE_MODE": "a_mode", "B_SCALE_MODE": "b_mode",
    "EMULATION_DESCRIPTOR": "emulation_descriptor",
}  # fmt: skip
_OF_MATRIX = {
    "TYPE": "type", "ROWS": "rows", "COLS": "cols", "LD": "ld", "ORDER": "order", "BATCH_COUNT": "batch_count",
    "STRIDED_BATCH_OFFSET": "batch_stride",
}  # fmt: skip


def problem(operation, layouts):
    """Return what a descriptor of an operation and layouts describe."""
    matrices = [
        Matrix(name, **_fields(layout, real.MatrixLayoutAttribute, _OF_MATRIX))
        for name, layout in zip("ABCD", layouts, strict=True)
    ]
    found = Problem(*matrices, **_fields(operation, real.MatmulDescAttribute, _OF_PROBLEM))
    if found.bias_type >= 0:
        return found
    is_float32 = found.is_narrow and found.d.type == tables.R_32F
    return replace(found, bias_type=tables.R_16BF if is_float32 else found.d.type)


def _fields(described, attributes, names):
    values = described.numbers(attributes)
    if unknown := values.keys() - names.keys():
        raise NotImplementedError(f"the software cuBLASLt does not model {unknown}")
    return {names[name]: value for name, value in values.items()}


# -- refusals -------------------------------------------------------------------------------------


def validate(x, capability, switches):
    """Refuse a product that cuBLASLt does not compute on a device."""
    if switches.large_batches and x.d.batch_count > _MOST_MATRICES:
        raise Refusal(NOT_SUPPORTED, f"{x.d.batch_count} matrices")
    for matrix in (x.a, x.b, x.c, x.d):
        _validate_layout(matrix)
    row = tables.row(x.compute, x.scale, x.a.type, x.b.type, x.c.type, x.d.type)
    if row is None:
        raise Refusal(NOT_SUPPORTED, f"no such combination of types: {x.signature}")
    _validate_extents(x)
    _validate_epilogue(x, row)
    if x.emulation_descriptor and x.compute not in tables.EMULATED_FLAGS:
        raise Refusal(INVALID_VALUE, f"an emulation descriptor with compute type {x.compute}")
    if (x.a_scale or x.b_scale or x.a_mode or x.b_mode) and not x.is_narrow:
        raise Refusal(INVALID_VALUE, "A and B have scales only for FP8 and FP4")
    if x.a.type == tables.R_8I:
        _validate_int8(x)
    if x.is_narrow:
        _validate_narrow(x, capability)
        _validate_scales(x, capability, switches)


def _validate_layout(x):
    if x.order not in (real.Order.COL, real.Order.ROW):
        raise Refusal(NOT_SUPPORTED, f"{x.name}: order {x.order}")
    if not x.rows or not x.cols or x.batch_count < 1:
        raise Refusal(INVALID_VALUE, f"{x.name}: nothing in {x.shape}")
    if x.ld < (x.rows if x.order == real.Order.COL else x.cols):
        raise Refusal(INVALID_VALUE, f"{x.name}: leading dimension {x.ld} for {x.shape}")


def _validate_extents(x):
    rows, inner = (x.a.cols, x.a.rows) if x.op_a else (x.a.rows, x.a.cols)
    other, cols = (x.b.cols, x.b.rows) if x.op_b else (x.b.rows, x.b.cols)
    if (rows, cols) != (x.m, x.n) or inner != other or (x.c.rows, x.c.cols) != (x.m, x.n):
        shapes = [y.shape for y in (x.a, x.b, x.c, x.d)]
        raise Refusal(INVALID_VALUE, f"extents do not fit: {shapes}, {x.op_a}, {x.op_b}")
    if len({y.batch_count for y in (x.a, x.b, x.c, x.d)}) != 1:
        raise Refusal(INVALID_VALUE, "batch counts differ")
    if x.d.batch_count > 1:
        # One matrix after another, or side by side within the leading dimension.
        (_, end), step = replace(x.d, batch_count=1).span(), abs(x.d.batch_stride)
        contiguous = x.d.rows if x.d.order == real.Order.COL else x.d.cols
        interleaved = step >= contiguous and step * x.d.batch_count <= x.d.ld
        if step * x.d.dtype.itemsize < end and not interleaved:
            raise Refusal(INVALID_VALUE, f"D overlaps itself: batch stride {step}")


def _validate_epilogue(x, row):
    if x.epilogue == 1:
        return
    if x.epilogue not in _EPILOGUES:
        raise NotImplementedError(f"epilogue {x.epilogue} is not modelled")
    if row.bias == tables.NO_EPILOGUE:
        raise Refusal(NOT_SUPPORTED, f"epilogue {x.epilogue} for these types")
    if x.d.order != real.Order.COL:
        raise Refusal(NOT_SUPPORTED, "an epilogue with a row-major D")
    if x.has_bias:
        if x.bias_type != row.bias:
            raise Refusal(NOT_SUPPORTED, f"bias of type {x.bias_type}, not {row.bias}")
        if not x.bias_pointer:
            raise Refusal(INVALID_VALUE, "an epilogue with bias, and no pointer to it")


def _validate_int8(x):
    # The requirements of the IMMA kernels in regular data ordering.
    if (x.op_a, x.op_b) != (1, 0) or {x.a.order, x.b.order, x.d.order} != {0}:
        raise Refusal(NOT_SUPPORTED, "int8 kernels are TN in column-major terms")
    if any(y.ld % 4 for y in (x.a, x.b, x.c, x.d)) or x.m % 4 or x.k % 4:
        raise Refusal(
            NOT_SUPPORTED, "int8 kernels want leading dimensions, m and k in multiples of 4"
        )


def _validate_narrow(x, capability):
    if not tables.has_float8(capability):
        raise Refusal(NOT_SUPPORTED, f"no FP8 on compute capability {capability}")
    wants_tn = x.a.type == tables.R_4F_E2M1 or tables.float8_wants_tn(capability)
    if wants_tn and (x.op_a, x.op_b) != (1, 0):
        raise Refusal(NOT_SUPPORTED, "FP8 and FP4 kernels are TN in column-major terms")
    if {x.a.order, x.b.order, x.c.order, x.d.order} != {0}:
        raise Refusal(NOT_SUPPORTED, "FP8 and FP4 kernels are column-major")
    if any(y.alignment() < 16 for y in (x.a, x.b, x.c, x.d)):
        raise Refusal(
            NOT_SUPPORTED, "FP8 and FP4 kernels want leading dimensions in multiples of 16 bytes"
        )
    sizes = (x.k * x.a.bits, x.k * x.b.bits, x.m * x.c.bits, x.m * x.d.bits)
    if any(size % 128 for size in sizes):
        raise Refusal(
            NOT_SUPPORTED, "FP8 and FP4 kernels want k and the rows of D in steps of 16 bytes"
        )


def _validate_float_scales(x, capability):
    if not tables.has_float_scales(capability):
        raise Refusal(
            NOT_SUPPORTED,
            f"no float32 scales of vectors and blocks on compute capability {capability}",
        )
    if x.d.batch_count > 1:
        raise NotImplementedError("batches with scales of vectors and blocks are not modelled")
    in_blocks = x.a_mode != tables.OUTER_VEC_32F
    if in_blocks and (x.m % 4 or x.n % 4):
        raise Refusal(NOT_SUPPORTED, f"scales of blocks with extents {x.m}, {x.n}")
    for pointer in (x.a_scale, x.b_scale):
        if not pointer or (in_blocks and pointer % 16):
            raise Refusal(INVALID_VALUE, f"scales of vectors or blocks at {pointer:#x}")


def _validate_scales(x, capability, switches):
    modes = (x.a_mode, x.b_mode)
    fp4 = x.a.type == tables.R_4F_E2M1
    if modes == (tables.SCALAR_32F,) * 2 and not fp4:
        if switches.float8_scales and not (x.a_scale and x.b_scale):
            raise Refusal(NOT_SUPPORTED, "FP8 operands without scales")
        return
    if modes in tables.FLOAT_SCALES and not fp4:
        _validate_float_scales(x, capability)
        if switches.block_extents and modes != (tables.OUTER_VEC_32F,) * 2 and x.k % 128:
            raise Refusal(NOT_SUPPORTED, f"blocks with an inner extent {x.k}")
        return
    if switches.block_extents and (x.m % 16 or x.n % 16 or x.k % (32 if fp4 else 128)):
        raise Refusal(NOT_SUPPORTED, f"blocks with extents {x.m}, {x.n}, {x.k}")
    if switches.fp4_bias and fp4 and x.epilogue == _BIAS:
        raise Refusal(NOT_SUPPORTED, "FP4 with a bias alone")
    if modes != (tables.VEC16_UE4M3 if fp4 else tables.VEC32_UE8M0,) * 2:
        raise Refusal(NOT_SUPPORTED, f"scale modes {modes} for operands of type {x.a.type}")
    if not tables.has_block_scales(capability):
        raise Refusal(NOT_SUPPORTED, f"no scales of blocks on compute capability {capability}")
    if x.d.batch_count > 1:
        raise NotImplementedError("batches with scales of blocks are not modelled")
    for pointer in (x.a_scale, x.b_scale):
        if not pointer or pointer % 16:
            raise Refusal(INVALID_VALUE, f"scales of blocks at {pointer:#x}")
