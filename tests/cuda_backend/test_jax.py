"""JAX on a GPU, end to end, by a replacement on the software CUDA.

Its streams are unknown and late, and its unused memory is poisoned.
"""

import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import lowprec
from cuda_backend.device_fixture import draw
from lowprec.arrays import libraries
from lowprec.backends.cuda import memory
from software_cuda.jax import Jax
from support import oracles

MODES = ("fp32", "tf32", "bf16", "fp16")


A, B, C = draw(0, 24, 24), draw(1, 24, 24), draw(2, 24, 24)
TRUE = oracles.product(A, B)


@pytest.fixture(params=[True, False], ids=["streams", "no streams"])
def jax(software, monkeypatch, request):
    """A JAX on the software devices, whose client has a stream for others, or none."""
    made = Jax(software.software.runtime, has_streams=request.param)
    monkeypatch.setitem(sys.modules, "jax", made)
    before = libraries._INSTANCES.pop("jax", None)
    yield made
    libraries._INSTANCES.pop("jax", None)
    libraries.BY_TYPE.pop(made.Array, None)
    if before is not None:
        libraries._INSTANCES["jax"] = before


@pytest.mark.parametrize("mode", MODES)
def test_operands_that_are_still_being_computed(jax, mode):
    a, b = (jax.add(jax.asarray(x - 1), 1) for x in (A, B))
    found = lowprec.matmul(a, b, math_mode=mode)
    assert type(found) is jax.Array
    # JAX's next computation waits for the product by itself.
    np.testing.assert_array_equal(jax.asnumpy(jax.add(found, 1)), TRUE + 1)
    one = jax.asarray(np.eye(24, dtype=np.float32))
    for _ in range(5):
        found = lowprec.matmul(found, one, math_mode=mode)
        gc.collect()
    np.testing.assert_array_equal(jax.asnumpy(found), TRUE)


@pytest.mark.parametrize("mode", MODES)
def test_operands_may_go_while_the_product_waits(jax, mode):
    a, b = jax.asarray(A), jax.asarray(B)
    found = lowprec.matmul(a, b, math_mode=mode)
    del a, b
    gc.collect()
    others = [jax.asarray(C) for _ in range(3)]  # take the memory, in the order of JAX's stream
    for x in others:
        np.testing.assert_array_equal(jax.asnumpy(x), C)
    np.testing.assert_array_equal(jax.asnumpy(found), TRUE)


def test_another_device_than_the_current_one(jax, software):
    a, b = jax.asarray(A, device=1), jax.asarray(B, device=1)
    found = lowprec.matmul(a, b, math_mode="bf16")
    assert found.device is a.device
    assert software.software.runtime.device == 0
    np.testing.assert_array_equal(jax.asnumpy(found), TRUE)
    with pytest.raises(lowprec.DeviceError, match="cuda:1"):
        lowprec.matmul(a, jax.asarray(B, device=0))


@pytest.mark.parametrize("committed", [None, 0], ids=["uncommitted", "committed"])
def test_a_result_is_committed_as_its_operands_are(jax, committed):
    a, b = jax.asarray(A, device=committed), jax.asarray(B)
    found = lowprec.matmul(a, b)
    assert found.committed is (committed is not None)
    np.testing.assert_array_equal(jax.asnumpy(found), TRUE)


def test_another_librarys_operand(jax, software):
    found = lowprec.matmul(jax.asarray(A), software.put(B))
    assert type(found) is jax.Array
    np.testing.assert_array_equal(jax.asnumpy(found), TRUE)
    other = lowprec.matmul(software.put(A), jax.asarray(B))
    np.testing.assert_array_equal(software.get(other), TRUE)


def test_a_result_known_only_by_dlpack_is_adopted(jax, software):
    found = jax.dlpack.from_dlpack(lowprec.matmul(software.put(A), software.put(B)))
    np.testing.assert_array_equal(jax.asnumpy(jax.add(found, 1)), TRUE + 1)


@pytest.mark.parametrize("by_jax", [True, False], ids=["of JAX's arrays", "adopted"])
def test_a_result_may_go_while_jax_reads_it(jax, software, by_jax, monkeypatch):
    """JAX frees it in the order of its compute stream, which is another one than it passes to lowprec."""
    monkeypatch.setattr(memory, "_MAX_DEAD", 0)
    operands = [jax.asarray(x) if by_jax else software.put(x) for x in (A, B)]
    found = lowprec.matmul(*operands)
    found = found if by_jax else jax.dlpack.from_dlpack(found)
    late = jax.add(found, 1)
    del found
    gc.collect()
    frees = software.software.count("cudaFree")
    lowprec.matmul(*operands)
    assert software.software.count("cudaFree") > frees
    np.testing.assert_array_equal(jax.asnumpy(late), TRUE + 1)


def test_a_donated_array_is_refused(jax):
    a = jax.asarray(A)
    assert jax.donate(a)
    with pytest.raises(lowprec.ArrayError, match="has been deleted"):
        lowprec.matmul(a, a)


def test_an_operand_is_held_until_it_is_read(jax, software):
    """Without the thread, finished work holds its operand until the next call."""
    a = jax.asarray(A)
    lowprec.matmul(a, a)
    software.software.drain()
    assert a.buffer.is_held
    assert not jax.donate(a)


@pytest.mark.usefixtures("waiting_thread")
@pytest.mark.parametrize("device", [0, 1])
def test_an_operand_can_be_donated_without_another_call(jax, device):
    a = jax.asarray(A, device=device)
    found = lowprec.matmul(a, a, math_mode="bf16")
    assert a.buffer.free.wait(60)  # only a failure takes this long
    assert jax.donate(a)
    np.testing.assert_array_equal(jax.asnumpy(found), oracles.product(A, A))
    gone = threading.Event()
    b = jax.asarray(A, device=device)
    weakref.finalize(b.buffer, gone.set)
    lowprec.matmul(b, b)
    del b
    assert gone.wait(60)


@pytest.mark.usefixtures("waiting_thread")
def test_threads_multiply_while_it_polls(jax):
    def work(number):
        right = True
        x, y = jax.asarray(A + number), jax.asarray(B)
        true = oracles.product(A + number, B)
        for mode in MODES * 3:
            found = lowprec.matmul(x, y, math_mode=mode)
            right &= np.array_equal(jax.asnumpy(found), true)
        return bool(right)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
