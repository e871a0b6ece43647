"""Shapes and strides of a product, against NumPy's own rules."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from lowprec.errors import ShapeError
from lowprec.formats import DType
from lowprec.planning.layout import OperandSpec, gemm_layout


def spec(x):
    strides = tuple(s // x.itemsize for s in x.strides)
    return OperandSpec(DType.FLOAT32, x.shape, strides)


def numbered(*shape):
    return np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)


def read(storage, start, o, batch):
    """The matrices that a layout describes, read out of the operand's memory."""
    offset = (start.ctypes.data - storage.ctypes.data) // 4
    index = np.full((*batch, o.rows, o.cols), offset)
    for axis, step in enumerate((*o.batch_strides, o.row_stride, o.col_stride)):
        steps = np.arange(index.shape[axis]) * step
        index += steps.reshape((-1,) + (1,) * (index.ndim - axis - 1))
    return storage.ravel()[index]


@st.composite
def operand_views(draw):
    """Two views that fit together: sliced, reversed, transposed, broadcast, with or without batch."""
    m, n, k = (draw(st.integers(1, 4)) for _ in range(3))
    batch = draw(st.lists(st.integers(1, 3), max_size=2).map(tuple))

    def view(rows, cols):
        own = batch[draw(st.integers(0, len(batch))) :]
        shape = (*(draw(st.sampled_from([x, 1])) for x in own), rows, cols)
        transposed = draw(st.booleans())
        stored = (*shape[:-2], cols, rows) if transposed else shape
        steps = [draw(st.sampled_from([1, 1, 2, -1])) for _ in stored]
        storage = numbered(*(x * abs(s) for x, s in zip(stored, steps, strict=True)))
        x = storage[tuple(slice(None, None, s) for s in steps)]
        return storage, x.swapaxes(-1, -2) if transposed else x

    return (*view(m, k), *view(k, n))


@given(operand_views())
def test_the_layout_describes_the_product(views):
    """Multiplying what the layout points at gives NumPy's product, collapsed or not."""
    storage_a, a, storage_b, b = views
    layout = gemm_layout(spec(a), spec(b))
    product = np.matmul(
        read(storage_a, a, layout.a, layout.batch_shape),
        read(storage_b, b, layout.b, layout.batch_shape),
    )
    # Small integers: float32 sums of them are exact.
    np.testing.assert_array_equal(product.reshape(layout.out_shape), a @ b)
    assert layout.batch_count == np.prod(layout.batch_shape, dtype=int)


@pytest.mark.parametrize(
    ("view", "order", "leading_dimension", "op"),
    [
        (numbered(4, 5), "row", 5, "N"),
        (numbered(4, 5).T, "col", 5, "T"),
        (numbered(4, 8)[:, :5], "row", 8, "N"),
        (numbered(4, 8)[::2], "row", 16, "N"),
        (numbered(4, 8)[:, ::2], None, None, "N"),
        (numbered(4, 5)[::-1], None, None, "N"),
        (np.broadcast_to(numbered(5), (4, 5)), None, None, "N"),
        (as_strided(numbered(8), (4, 5), (4, 4)), None, None, "N"),
        (numbered(1, 8)[:, ::2], "col", 2, "T"),
        (numbered(8, 2)[:, :1], "row", 2, "N"),
        (numbered(8, 4)[:, ::4], "row", 4, "N"),
        (numbered(0, 5), "row", 5, "N"),
    ],
    ids=[
        "plain", "transposed", "columns", "rows", "steps", "reversed",
        "broadcast", "windows", "row", "column", "steps of one", "empty",
    ],
)  # fmt: skip
def test_layouts_of_blas(view, order, leading_dimension, op):
    b = OperandSpec.contiguous(DType.FLOAT32, (view.shape[1], 3))
    found = gemm_layout(spec(view), b).a
    assert (found.order, found.leading_dimension, found.op) == (order, leading_dimension, op)


@pytest.mark.parametrize(
    ("a", "b", "collapsed"),
    [
        (numbered(2, 3, 4), numbered(4, 5), True),
        (numbered(2, 2, 3, 4), numbered(4, 5), True),
        (numbered(2, 3, 4), numbered(4), True),
        (numbered(2, 3, 4), numbered(1, 4, 5), True),
        (numbered(2, 3, 4), np.broadcast_to(numbered(4, 5), (2, 4, 5)), True),
        (numbered(2, 6, 4)[:, ::2], numbered(4, 5), True),
        (numbered(2, 3, 4), numbered(2, 4, 5), False),
        (numbered(3, 4), numbered(2, 4, 5), False),
        (numbered(2, 4, 3).swapaxes(1, 2), numbered(4, 5), False),
        (numbered(4, 3, 4)[::2], numbered(4, 5), False),
        (np.broadcast_to(numbered(3, 4), (2, 3, 4)), numbered(4, 5), False),
        (numbered(3, 2, 3, 4).swapaxes(0, 1), numbered(4, 5), False),
        # Sliding windows: each is a row BLAS can read, together they overlap.
        (as_strided(numbered(9), (6, 1, 4), (4, 4, 4)), numbered(4, 5), False),
        (numbered(1, 3, 4), numbered(4, 5), False),
        (numbered(2, 3, 0), numbered(0, 5), True),
        (numbered(2, 0, 4), numbered(4, 5), False),
    ],
)
def test_a_batch_becomes_rows_where_one_product_suffices(a, b, collapsed):
    layout = gemm_layout(spec(a), spec(b))
    assert layout.collapsed is collapsed
    assert layout.out_shape == (a @ b).shape
    if collapsed:
        assert (layout.m, layout.batch_shape, layout.batch_count) == (
            np.prod(a.shape[:-1]), (), 1,
        )  # fmt: skip


def test_an_out_with_gaps_between_batches_is_not_collapsed():
    a, b = numbered(2, 3, 4), numbered(4, 5)
    out = numbered(4, 3, 5)[::2]
    assert not gemm_layout(spec(a), spec(b), spec(out)).collapsed
    assert gemm_layout(spec(a), spec(b), spec(numbered(2, 3, 5))).collapsed


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (numbered(2, 5), r"out has shape \(2, 5\), but the result has shape \(2, 4\)"),
        (np.broadcast_to(numbered(4), (2, 4)), "out has elements that may share memory"),
    ],
)
def test_an_out_that_cannot_be_written_is_refused(out, words):
    with pytest.raises(ShapeError, match=words):
        gemm_layout(spec(numbered(2, 3)), spec(numbered(3, 4)), spec(out))


def test_stored_bytes_count_a_broadcast_dimension_once():
    assert spec(np.broadcast_to(numbered(5), (4, 5))).stored_bytes == 20
    assert spec(np.broadcast_to(numbered(5), (0, 5))).stored_bytes == 0
