"""Formats and element types against ml_dtypes and NumPy."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from lowprec import formats
from lowprec.errors import DTypeError
from lowprec.formats import DType, dtype_from_dlpack, dtype_from_name, operand_names, promote

FLOATS = [d for d in DType if d.format is not None]
ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")

#: Formats of elements, and those of the codes of quantised arrays.
FORMATS = [d.format for d in FLOATS if not d.is_complex] + [
    formats.FLOAT4_E2M1FN,
    formats.FLOAT8_E8M0FNU,
]


def numpy_dtype(dtype):
    return np.dtype(getattr(ml_dtypes, dtype.label) if dtype.label in ML_DTYPES else dtype.label)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_format_against_finfo(fmt):
    dtype = np.dtype(getattr(ml_dtypes, fmt.name, fmt.name))
    info = ml_dtypes.finfo(dtype)
    assert fmt.precision == info.nmant + 1
    assert fmt.emin == info.minexp
    # finfo counts the exponent above the largest number, 2^maxexp.
    assert fmt.emax == info.maxexp - 1
    assert fmt.largest == float(info.max)
    assert fmt.smallest_normal == float(info.smallest_normal)
    assert fmt.smallest_subnormal == float(info.smallest_subnormal)
    assert fmt.unit_roundoff == float(info.eps) / 2
    assert np.isinf(np.array(np.inf).astype(dtype).astype(np.float64)) == fmt.has_infinity


def test_tf32_has_float16s_precision_and_float32s_range():
    tf32 = formats.TF32
    assert tf32.precision == 11 == formats.FLOAT16.precision
    assert (tf32.emin, tf32.emax) == (formats.FLOAT32.emin, formats.FLOAT32.emax)
    # Its largest number is float32's with the 13 lowest bits of the significand cleared.
    bits = np.array(np.finfo(np.float32).max).view(np.uint32) & np.uint32(0xFFFFE000)
    assert tf32.largest == float(bits.view(np.float32))
    assert tf32.largest < formats.FLOAT32.largest


@pytest.mark.parametrize("dtype", DType, ids=str)
def test_element_type_against_numpy(dtype):
    known = numpy_dtype(dtype)
    assert dtype.label == str(dtype) == known.name
    assert dtype.itemsize == known.itemsize == dtype.bits // 8
    assert dtype.is_complex == (known.kind == "c")
    assert dtype.is_float8 == dtype.label.startswith("float8")
    assert dtype_from_name(dtype.label) is dtype
    if dtype in FLOATS:
        assert dtype.format.name == np.zeros((), known).real.dtype.name


@pytest.mark.parametrize("name", ["float8_e4m3", "int16", "bool", "", "Float32"])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(DTypeError, match=f"dtype '{name}' is not supported") as caught:
        dtype_from_name(name)
    assert str(caught.value).endswith(operand_names())


@pytest.mark.parametrize("triple", [(1, 8), (2, 128), (3, 64), (6, 8), (2, 32, 4)])
def test_an_unknown_dlpack_type_names_its_parts(triple):
    lanes = triple[2] if len(triple) == 3 else 1
    expected = rf"code {triple[0]}, bits {triple[1]}, lanes {lanes}\) is not supported"
    with pytest.raises(DTypeError, match=expected):
        dtype_from_dlpack(*triple)


def expected_promotion(a, b):
    """Return NumPy's common type, and what JAX and PyTorch agree on where NumPy with ml_dtypes has none."""
    if DType.FLOAT8_E4M3FN in (a, b) and DType.FLOAT8_E5M2 in (a, b):
        return DType.BFLOAT16
    if a.is_float8 or b.is_float8:
        return b if a.is_float8 else a
    if {a, b} == {DType.BFLOAT16, DType.FLOAT16}:
        return DType.FLOAT32
    return dtype_from_name(np.promote_types(numpy_dtype(a), numpy_dtype(b)).name)


@pytest.mark.parametrize(("a", "b"), [*itertools.combinations_with_replacement(DType, 2)], ids=str)
def test_promotion(a, b):
    if a is b or (a in FLOATS and b in FLOATS):
        assert promote(a, b) is promote(b, a) is expected_promotion(a, b)
        return
    for first, second in ((a, b), (b, a)):
        with pytest.raises(DTypeError, match=f"{first} and {second} have no common type"):
            promote(first, second)
