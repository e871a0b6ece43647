"""A product as its descriptors describe it, and the requirements of cuBLASLt."""

from dataclasses import dataclass, replace

from nvmath.bindings import cublasLt as real

from software_cuda import tables
from software_cuda.emulation import Emulation
from software_cuda.objects import INVALID_VALUE, NOT_SUPPORTED
from software_cuda.recorder import Refusal

_DESC, _LAYOUT = real.MatmulDescAttribute, real.MatrixLayoutAttribute
_EPILOGUES = frozenset(int(real.Epilogue[x]) for x in ("DEFAULT", "RELU", "BIAS", "RELU_BIAS", "GELU", "GELU_BIAS"))
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
    order: int
    batch_count: int
    batch_stride: int

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

    compute: int
    scale: int
    op_a: int
    op_b: int
    epilogue: int
    bias_pointer: int
    bias_type: int
    bias_batch_stride: int
    a_scale: int
    b_scale: int
    a_mode: int
    b_mode: int
    a: Matrix
    b: Matrix
    c: Matrix
    d: Matrix
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
        return (self.compute, self.scale, self.op_a, self.op_b, self.a_mode, self.b_mode, *types, *orders)


def problem(operation, layouts):
    dtype = real.get_matmul_desc_attribute_dtype

    def get(name, default):
        return operation.get(_DESC[name], dtype(_DESC[name]), default)

    _only_modelled(get)
    a, b, c, d = (_matrix(x, name) for x, name in zip(layouts, "ABCD", strict=True))
    bias_type = get("BIAS_DATA_TYPE", -1)
    if bias_type < 0:
        narrow = a.type in tables.FLOAT8 or a.type == tables.R_4F_E2M1
        bias_type = tables.R_16BF if narrow and d.type == tables.R_32F else d.type
    return Problem(
        compute=get("COMPUTE_TYPE", 0),
        scale=get("SCALE_TYPE", 0),
        op_a=get("TRANSA", 0),
        op_b=get("TRANSB", 0),
        epilogue=get("EPILOGUE", 1),
        bias_pointer=get("BIAS_POINTER", 0),
        bias_type=bias_type,
        bias_batch_stride=get("BIAS_BATCH_STRIDE", 0),
        a_scale=get("A_SCALE_POINTER", 0),
        b_scale=get("B_SCALE_POINTER", 0),
        a_mode=get("A_SCALE_MODE", 0),
        b_mode=get("B_SCALE_MODE", 0),
        a=a,
        b=b,
        c=c,
        d=d,
        emulation_descriptor=get("EMULATION_DESCRIPTOR", 0),
    )


#: Attributes that change the result and are not modelled.
_UNMODELLED = (
    "POINTER_MODE", "TRANSC", "FILL_MODE", "EPILOGUE_AUX_POINTER", "C_SCALE_POINTER", "D_SCALE_POINTER",
    "AMAX_D_POINTER", "C_SCALE_MODE", "D_SCALE_MODE", "D_OUT_SCALE_MODE", "ALPHA_VECTOR_BATCH_STRIDE",
)  # fmt: skip


def _only_modelled(get):
    for name in _UNMODELLED:
        if get(name, 0):
            raise NotImplementedError(f"the software cuBLASLt does not model {name}")


def _matrix(layout, name):
    def get(attribute, default):
        member = _LAYOUT[attribute]
        return layout.get(member, real.get_matrix_layout_attribute_dtype(member), default)

    if get("PLANE_OFFSET", 0) or get("BATCH_MODE", 0):
        raise NotImplementedError("planes and arrays of pointers are not modelled")
    return Matrix(
        name,
        get("TYPE", 0),
        get("ROWS", 0),
        get("COLS", 0),
        get("LD", 0),
        get("ORDER", 0),
        get("BATCH_COUNT", 1),
        get("STRIDED_BATCH_OFFSET", 0),
    )


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
    if x.type not in tables.DTYPES:
        raise Refusal(NOT_SUPPORTED, f"{x.name}: type {x.type}")
    if not x.rows or not x.cols or x.batch_count < 1:
        raise Refusal(INVALID_VALUE, f"{x.name}: nothing in {x.shape}")
    if x.ld < (x.rows if x.order == real.Order.COL else x.cols):
        raise Refusal(INVALID_VALUE, f"{x.name}: leading dimension {x.ld} for {x.shape}")


def _validate_extents(x):
    if not {x.op_a, x.op_b} <= {0, 1, 2}:
        raise Refusal(INVALID_VALUE, f"operations {x.op_a}, {x.op_b}")
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
        raise Refusal(NOT_SUPPORTED, "int8 kernels want leading dimensions, m and k in multiples of 4")


def _validate_narrow(x, capability):
    if not tables.has_float8(capability):
        raise Refusal(NOT_SUPPORTED, f"no FP8 on compute capability {capability}")
    wants_tn = x.a.type == tables.R_4F_E2M1 or tables.float8_wants_tn(capability)
    if wants_tn and (x.op_a, x.op_b) != (1, 0):
        raise Refusal(NOT_SUPPORTED, "FP8 and FP4 kernels are TN in column-major terms")
    if {x.a.order, x.b.order, x.c.order, x.d.order} != {0}:
        raise Refusal(NOT_SUPPORTED, "FP8 and FP4 kernels are column-major")
    if any(y.alignment() < 16 for y in (x.a, x.b, x.c, x.d)):
        raise Refusal(NOT_SUPPORTED, "FP8 and FP4 kernels want leading dimensions in multiples of 16 bytes")
    sizes = (x.k * x.a.bits, x.k * x.b.bits, x.m * x.c.bits, x.m * x.d.bits)
    if any(size % 128 for size in sizes):
        raise Refusal(NOT_SUPPORTED, "FP8 and FP4 kernels want k and the rows of D in steps of 16 bytes")


def _validate_scales(x, capability, switches):
    modes = (x.a_mode, x.b_mode)
    fp4 = x.a.type == tables.R_4F_E2M1
    if modes == (tables.SCALAR_32F,) * 2 and not fp4:
        if switches.float8_scales and not (x.a_scale and x.b_scale):
            raise Refusal(NOT_SUPPORTED, "FP8 operands without scales")
        return
    if switches.block_extents and (x.m % 16 or x.n % 16 or x.k % 32):
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
