"""Arrays of every library, in and out: the same memory, true types, clear refusals, no leak."""

import ctypes
import datetime
import gc
import itertools
import types
import weakref

import numpy as np
import pytest

import lowprec
from frameworks.backends import Backend, DLPackOnly
from frameworks.conftest import load_or_skip
from lowprec.arrays import CPU, NUMPY_DTYPES, Device, DLPackArray, library_of
from lowprec.arrays.dlpack import _Tensor, _Versioned, import_array, view_of_capsule
from lowprec.arrays.torch_library import TorchLibrary
from lowprec.errors import ArrayError, DeviceError, DTypeError
from lowprec.formats import DType
from support.programs import run_python

ALL_DTYPES = pytest.mark.parametrize("dtype", list(DType), ids=str)


def sample(dtype, shape=(5, 3)):
    # Small integers: exact in every type, float8 included.
    values = np.arange(int(np.prod(shape))) % 8
    return values.astype(NUMPY_DTYPES[dtype]).reshape(shape)


def pointer(array):
    """The address by the library's own means, not lowprec's."""
    if isinstance(array, DLPackOnly):
        return pointer(array._producer)
    if isinstance(array, DLPackArray):
        return pointer(np.asarray(array))
    for means in ("data_ptr", "unsafe_buffer_pointer"):
        if hasattr(array, means):
            return getattr(array, means)()
    return array.ctypes.data


# --- in


@ALL_DTYPES
def test_every_dtype_comes_in_without_a_copy(xp, dtype):
    expected = sample(dtype)
    array = xp.asarray(expected)
    view = library_of(array).view(array)
    assert (view.dtype, view.shape, view.strides) == (dtype, (5, 3), (3, 1))
    assert (view.device, view.copied) == (CPU, None)
    assert view.address == pointer(array)
    host = view.ndarray()
    assert host.ctypes.data == pointer(array)
    assert host.dtype == expected.dtype
    assert host.tobytes() == expected.tobytes()


@ALL_DTYPES
def test_every_dtype_goes_out_without_a_copy(xp, dtype):
    expected = sample(dtype)
    like = xp.asarray(sample(DType.FLOAT32))
    library = library_of(like)
    view = library.allocate((5, 3), dtype, CPU, like)
    assert (view.dtype, view.shape, view.strides) == (dtype, (5, 3), (3, 1))
    assert not view.read_only
    view.ndarray()[...] = expected
    address = view.address
    result = library.wrap(view.owner, like)
    assert isinstance(result, xp.result_type)
    assert pointer(result) == address
    back = xp.to_numpy(result)
    assert back.dtype == expected.dtype
    assert back.tobytes() == expected.tobytes()


def test_a_view_keeps_the_memory_alive(xp):
    expected = np.arange(4096, dtype=np.float32)
    array = xp.asarray(expected.copy())
    host = library_of(array).view(array).ndarray()
    del array
    gc.collect()
    churn = [np.full(4096, -1, np.float32) for _ in range(50)]
    np.testing.assert_array_equal(host, expected)
    assert len(churn) == 50


def test_strides_of_tensors_come_in_as_they_are(torch):
    base = torch.arange(48.0).reshape(6, 8)
    for tensor in (base.T, base[::2, 1::3], base[0].expand(4, 8)):
        view = library_of(tensor).view(tensor)
        assert (view.strides, view.address, view.copied) == (
            tensor.stride(),
            tensor.data_ptr(),
            None,
        )


@pytest.mark.parametrize("make", [list, float, np.float32], ids=lambda m: m.__name__)
def test_non_arrays_are_refused(make):
    with pytest.raises(ArrayError, match=r"expected an array \(numpy, torch.*wrap it with numpy"):
        library_of(make())


class Unreadable:
    def __array__(self, *_, **__):
        raise OSError("lost")


@pytest.mark.parametrize(
    "wrong",
    [None, "1.0", np, dict, [[1.0], [1.0, 2.0]], Unreadable()],
    ids=lambda x: type(x).__name__,
)
def test_only_numbers_are_to_be_wrapped(wrong):
    with pytest.raises(ArrayError, match=r"expected an array \(numpy, torch.*got [\w.]+$"):
        library_of(wrong)


def test_subclasses_that_change_the_meaning_are_refused():
    with pytest.raises(ArrayError, match=r"MaskedArray is not accepted.*array.filled\(0\)"):
        library_of(np.ma.zeros(3))
    with pytest.raises(ArrayError, match=r"Units is not accepted.*numpy.asarray\(array\)"):
        library_of(np.zeros(3).view(type("Units", (np.ndarray,), {})))


def test_memory_maps_are_plain_arrays(tmp_path):
    np.save(tmp_path / "a.npy", sample(DType.FLOAT32))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    view = library_of(mapped).view(mapped)
    assert view.read_only
    np.testing.assert_array_equal(view.ndarray(), sample(DType.FLOAT32))


# --- torch


@pytest.mark.parametrize("has_guards", [True, False])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3), (2, 0), (2, 1, 3, 4)], ids=str)
def test_torch_results_are_made_as_torch_makes_them(torch, monkeypatch, shape, has_guards):
    if not has_guards:  # an older version
        monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu")
    library, like = TorchLibrary(torch), torch.ones(1)
    for inference, dtype in itertools.product((False, True), DType):
        with torch.inference_mode(inference):
            made = library.allocate(shape, dtype, CPU, like)
            expected = like.new_empty(shape, dtype=library._torch_dtypes[dtype])
        owner = made.owner
        assert (owner.dtype, owner.shape) == (expected.dtype, expected.shape)
        assert made.strides == owner.stride() == expected.stride()
        assert made.address == owner.data_ptr()
        assert owner.is_inference() == inference
        assert not owner.requires_grad


def test_torch_autograd_notices_a_written_out(torch):
    saved = torch.ones(3, 3)
    x = torch.ones(3, 3, requires_grad=True)
    y = (x * saved).sum()
    lowprec.matmul(x.detach(), x.detach(), out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("tell", [lowprec.plan, lowprec.autotune], ids=["plan", "autotune"])
def test_plan_and_autotune_leave_saved_tensors_usable(torch, tell):
    a, w = torch.ones(3, 3), torch.ones(3, 3, requires_grad=True)
    saved = torch.full((3, 3), 2.0)
    product = (w * saved).sum()
    tell(a, a, out=saved)
    product.backward()
    assert torch.equal(w.grad, saved)


def test_torch_lazy_conjugate_and_negative_are_carried_out(torch):
    z = torch.tensor([[1 + 2j, 3 - 4j]], dtype=torch.complex64)
    library = library_of(z)
    for lazy in (z.mH, z.conj().imag):
        view = library.view(lazy)
        assert view.copied == "its lazy conjugation or negation was resolved"
        np.testing.assert_array_equal(view.ndarray(), lazy.resolve_conj().resolve_neg().numpy())
        with pytest.raises(
            ArrayError, match="the array cannot be written in place: its lazy conjugation"
        ):
            library.writable_view(lazy)
    assert library.view(z).copied is None


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda t, x: x.to_sparse(), ArrayError, r"layout torch.sparse_coo; .*to_dense"),
        (lambda t, x: x.to_sparse_csr(), ArrayError, r"layout torch.sparse_csr; .*to_dense"),
        (lambda t, x: x.to_mkldnn(), ArrayError, r"layout torch._mkldnn; .*to_dense"),
        (lambda t, x: t.nested.nested_tensor([x, x]), ArrayError, r"nested; .*unbind"),
        (
            lambda t, x: t.nested.nested_tensor([x, x], layout=t.jagged),
            ArrayError,
            r"nested; .*unbind",
        ),
        (lambda t, x: x.to(t.int64), DTypeError, r"'int64' is not supported; supported: float64"),
        (lambda t, x: x.bool(), DTypeError, r"'bool' is not supported; supported: float64"),
    ],
    ids=["coo", "csr", "mkldnn", "nested", "jagged", "int64", "bool"],
)
def test_torch_tensors_without_plain_memory_are_refused(torch, make, error, message):
    array = make(torch, torch.ones(3, 3))
    with pytest.raises(error, match=message):
        lowprec.matmul(array, torch.ones(3, 3))


def test_torch_subclasses_are_refused(torch):
    class Tagged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, *rest, **kwargs):
            return super().__torch_function__(func, *rest, **kwargs)

    with pytest.raises(ArrayError, match=r"Tagged is not accepted: .*as_subclass\(torch.Tensor\)"):
        library_of(torch.ones(2).as_subclass(Tagged))
    fake_mode = pytest.importorskip("torch._subclasses").FakeTensorMode()
    with pytest.raises(ArrayError, match="FakeTensor is not accepted"):
        library_of(torch.ones(2)).view(fake_mode.from_tensor(torch.ones(2)))


def test_torch_devices_are_reported_truthfully(torch):
    library = library_of(torch.ones(1))
    assert library.device_of(torch.device("cpu")) == CPU
    assert library.device_of(torch.device("cuda", 1)) == Device(2, 1)
    assert library.device_of(torch.device("mps")) == Device(8, 0)
    assert library.device_of(torch.device("meta")) is None

    # A tensor of a GPU that this machine need not have: only what the view reads.
    real = torch.ones(2, 3)
    gpu_tensor = types.SimpleNamespace(
        requires_grad=False, dtype=real.dtype, is_neg=lambda: False, data_ptr=lambda: 4096,
        shape=real.shape, stride=real.stride, is_cpu=False, device=torch.device("cuda", 1),
    )  # fmt: skip
    library._plain.add(types.SimpleNamespace)
    view = library.describe(gpu_tensor)
    library._plain.remove(types.SimpleNamespace)
    assert (view.device, view.address, view.strides) == (Device(2, 1), 4096, (3, 1))


# --- jax


def test_jax_keys_are_refused(jax):
    key = jax.random.key(0)
    with pytest.raises(DTypeError, match=r"'key<fry>' is not supported"):
        library_of(key).view(key)


def test_jax_64_bit_results_need_64_bit_jax(jax):
    like = jax.numpy.ones(3, jax.numpy.float32)
    with jax.enable_x64(False), pytest.raises(DTypeError, match="64-bit types are disabled"):
        library_of(like).allocate((2,), DType.FLOAT64, CPU, like)
    with pytest.raises(DeviceError, match="cannot allocate the result on rocm:0"):
        library_of(like).allocate((2,), DType.FLOAT32, Device(10, 0), like)


def test_jax_other_layouts_are_read_right(jax):
    layout = pytest.importorskip("jax.experimental.layout")
    expected = np.arange(6, dtype=np.float32).reshape(2, 3)
    array = jax.device_put(expected)
    turned = jax.device_put(array, layout.Format(layout.Layout((1, 0)), array.sharding))
    view = library_of(turned).view(turned)
    np.testing.assert_array_equal(view.ndarray(), expected)
    assert view.copied == "its layout on the device is not row-major"


def test_jax_results_are_committed_as_those_of_jax_are(jax):
    free = jax.numpy.eye(3, dtype=jax.numpy.float32)
    bound = jax.device_put(free, jax.devices()[0])
    host = np.eye(3, dtype=np.float32)
    assert (free.committed, bound.committed) == (False, True)
    for operands in ((free, free), (free, bound), (bound, free), (free, host), (bound, host)):
        result = lowprec.matmul(*operands)
        assert result.committed == jax.numpy.matmul(*operands).committed
        assert (result.device, result.sharding) == (free.device, free.sharding)
    assert lowprec.matmul(free, free, c=bound, beta=1.0).committed
    assert lowprec.matmul(free, free, bias=bound[0]).committed
    assert not lowprec.matmul(free, free, c=free, beta=1.0, bias=free[0]).committed


def test_jax_uncommitted_results_are_arrays_like_any_other(jax):
    a = jax.numpy.arange(64.0, dtype=jax.numpy.float32).reshape(8, 8)
    expected = np.asarray(a) @ np.asarray(a)  # integers below 2^24: exact
    result = lowprec.matmul(a, a)
    again = lowprec.matmul(result, jax.numpy.eye(8, dtype=jax.numpy.float32))
    twice = jax.jit(lambda x: x + x, donate_argnums=0)(result)  # the memory may be reused, or not
    assert result.is_deleted() or (np.asarray(result) == expected).all()
    np.testing.assert_array_equal(np.asarray(twice), 2 * expected)
    np.testing.assert_array_equal(np.asarray(again), expected)
    again.delete()
    with pytest.raises(ArrayError, match=r"the JAX array cannot be read: .*deleted"):
        lowprec.matmul(again, a)
    # In a trace a product of arrays that are there is computed at once, and is a constant of the program.
    jaxpr = jax.make_jaxpr(lambda x: x + lowprec.matmul(a, a))(a)
    assert [str(e.primitive) for e in jaxpr.eqns] == ["add"]
    with jax.transfer_guard("disallow_explicit"):
        assert not lowprec.matmul(a, a).committed


@pytest.mark.usefixtures("jax")
def test_jax_several_devices():
    """In its own process: the number of CPU devices is fixed when JAX starts."""
    code = """
import jax, numpy as np
import lowprec
from lowprec.errors import DeviceError
first, second = jax.devices()
one = jax.device_put(np.ones((4, 2), np.float32), second)

free = jax.numpy.ones((2, 2), np.float32)
with jax.default_device(second):
    elsewhere = jax.numpy.ones((2, 2), np.float32)
bound = jax.device_put(free, second)
for operands in (free, bound), (bound, free), (bound, bound), (bound, elsewhere):
    ours, theirs = lowprec.matmul(*operands), jax.numpy.matmul(*operands)
    assert (ours.device, ours.committed) == (theirs.device, theirs.committed), operands
    assert float(ours.sum()) == 8
result = lowprec.matmul(elsewhere, elsewhere)
assert (result.device, result.committed) == (second, False)
assert (result + free).device == (elsewhere + free).device

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
parts, copies = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
for spec in parts, copies:
    both = jax.device_put(one, jax.sharding.NamedSharding(mesh, spec))
    host = np.ones((2, 4), np.float32)
    result = lowprec.matmul(both, host)  # by JAX, on all of them
    assert result.sharding.is_equivalent_to(both.sharding, 2) and float(result.sum()) == 32
    assert float(lowprec.matmul(host, both).sum()) == 16
    for arguments in (both, one.T), (one.T, both):
        try:
            lowprec.matmul(*arguments)
        except DeviceError as error:
            assert "by jax.device_put" in str(error), error
        else:
            raise SystemExit("operands on different devices were accepted")
"""
    run_python(code, XLA_FLAGS="--xla_force_host_platform_device_count=2")


# --- DLPack


class Capsules:
    """A producer in pure Python that writes any capsule, and counts how often its deleter is called."""

    def __init__(self, memory, versioned=True, **changes):
        self.memory = memory
        self.deleted = 0
        self.struct = _Versioned() if versioned else _Tensor()
        self.name = b"dltensor_versioned" if versioned else b"dltensor"
        self.changes = changes
        prototype = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
        self._destructor = prototype(self._destroy)
        new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, prototype)
        self._new = new(("PyCapsule_New", ctypes.pythonapi))

    def _destroy(self, _):
        self.deleted += 1

    def __dlpack_device__(self):
        return self.changes.get("device_type", 1), self.changes.get("device_id", 0)

    def capsule(self):
        memory = self.memory
        ndim = memory.ndim
        shape = self.changes.get("shape") or memory.shape
        strides = self.changes.get("strides") or [s // memory.itemsize for s in memory.strides]
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = (ctypes.c_int64 * len(strides))(*strides)
        values = {
            "data": memory.ctypes.data, "device_type": 1, "device_id": 0, "ndim": ndim, "code": 2,
            "bits": 8 * memory.itemsize, "lanes": 1, "shape": ctypes.addressof(self._shape),
            "strides": ctypes.addressof(self._strides), "byte_offset": 0,
            "major": 1, "minor": 0, "flags": 0,
        }  # fmt: skip
        integers = ("shape", "strides")
        values |= {k: v for k, v in self.changes.items() if v is None or k not in integers}
        versioned = isinstance(self.struct, _Versioned)
        tensor = self.struct.tensor if versioned else self.struct
        for field in ("major", "minor", "flags") if versioned else ():
            setattr(self.struct, field, values.pop(field))
        for field, *_ in _Tensor._fields_:
            setattr(tensor, field, values[field])
        return self._new(ctypes.addressof(self.struct), self.name, self._destructor)

    def __dlpack__(self, *, stream=None, max_version=None):
        return self.capsule()


class OldCapsules(Capsules):
    """A producer from before DLPack 1.0: no versions, and no ``max_version`` keyword."""

    def __init__(self, memory, **changes):
        super().__init__(memory, versioned=False, **changes)

    def __dlpack__(self, *, stream=None):
        return self.capsule()


@pytest.fixture
def memory():
    return np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize("kind", [Capsules, OldCapsules])
def test_the_deleter_is_called_once_when_the_view_dies(kind, memory):
    producer = kind(memory)
    view = library_of(producer).view(producer)
    assert view.address == memory.ctypes.data
    host = view.ndarray()
    gc.collect()
    assert producer.deleted == 0
    del view
    gc.collect()
    assert producer.deleted == 0  # the array made from it still reads the memory
    np.testing.assert_array_equal(host, memory)
    del host
    gc.collect()
    assert producer.deleted == 1
    assert library_of(producer).view(producer).shape == (3, 4)
    assert producer.deleted == 2


def test_a_refused_capsule_is_deleted_too(memory):
    producer = Capsules(memory, lanes=4)
    with pytest.raises(DTypeError, match=r"lanes 4\) is not supported"):
        library_of(producer).view(producer)
    gc.collect()
    assert producer.deleted == 1
    assert type(producer).__name__ == "Capsules"


def test_null_strides_are_row_major_and_offsets_count(memory):
    producer = Capsules(memory, strides=None)
    view = library_of(producer).view(producer)
    assert view.strides == (4, 1)
    np.testing.assert_array_equal(view.ndarray(), memory)
    row = Capsules(memory[:1], byte_offset=16)
    np.testing.assert_array_equal(library_of(row).view(row).ndarray(), memory[1:2])


def test_flags_of_a_versioned_capsule(memory):
    library = library_of(Capsules(memory))
    read_only = Capsules(memory, flags=1)
    assert library.view(read_only).read_only
    assert not library.view(read_only).ndarray().flags.writeable
    with pytest.raises(ArrayError, match="the array is read-only"):
        library.writable_view(read_only)
    copied = Capsules(memory, flags=2)
    assert library.view(copied).copied == "the array's library exported a copy"
    with pytest.raises(ArrayError, match="the array cannot be written in place"):
        library.writable_view(copied)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"major": 2}, ArrayError, r"exported as DLPack 2.0; lowprec reads DLPack 1"),
        ({"ndim": -1}, ArrayError, r"describes no array: ndim is -1"),
        ({"ndim": 1000}, ArrayError, r"describes no array: ndim is 1000"),
        ({"shape": None}, ArrayError, r"describes no array"),
        ({"shape": (3, -4)}, ArrayError, r"describes no array: its shape is \(3, -4\)"),
        ({"shape": (-(2**63), 0)}, ArrayError, r"describes no array: its shape is"),
        ({"shape": (2**32, 2**31)}, ArrayError, r"outside of the address space"),
        ({"shape": (2**62, 2**62), "strides": None}, ArrayError, r"outside of the address space"),
        ({"strides": (2**62, 1)}, ArrayError, r"outside of the address space"),
        ({"strides": (-(2**63), 1)}, ArrayError, r"outside of the address space"),
        ({"strides": (-(2**50), 1)}, ArrayError, r"outside of the address space"),
        ({"byte_offset": 2**64 - 4}, ArrayError, r"outside of the address space"),
        ({"data": 2**64 - 64}, ArrayError, r"outside of the address space"),
        ({"data": 2**64 - 64, "shape": (0, 4)}, ArrayError, r"outside of the address space"),
        ({"data": None}, ArrayError, r"no data: its pointer is null"),
        ({"code": 1}, DTypeError, r"\(code 1, bits 32, lanes 1\) is not supported"),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
@pytest.mark.sampled(3)
def test_bad_capsules_are_refused(memory, changes, error, message):
    producer = Capsules(memory, **changes)
    with pytest.raises(error, match=message):
        library_of(producer).view(producer)
    gc.collect()
    assert producer.deleted == 1


def test_zero_size_capsules_may_have_any_strides(memory):
    producer = Capsules(memory, shape=(0, 4), strides=(2**62, -(2**62)), data=None)
    view = library_of(producer).view(producer)
    assert view.ndarray().shape == (0, 4)
    assert lowprec.matmul(producer, memory.T).shape == (0, 3)


def test_consumed_capsules_and_other_objects_are_refused(memory):
    producer = Capsules(memory)
    producer.name = b"used_dltensor"
    with pytest.raises(ArrayError, match="capsule named b'used_dltensor'"):
        view_of_capsule(producer.capsule())
    gc.collect()
    assert producer.deleted == 1
    for other in ({}, None, type("PyCapsule", (), {})()):
        with pytest.raises(
            ArrayError, match=r"returned a (dict|NoneType|PyCapsule), not a capsule"
        ):
            view_of_capsule(other)
    other = datetime.datetime_CAPI  # a capsule of Python's own
    with pytest.raises(ArrayError, match=r"named b'datetime.datetime_CAPI'"):
        view_of_capsule(other)


@pytest.mark.parametrize(
    ("device_type", "device"), [(2, Device(2, 1)), (13, Device(2, 1)), (3, CPU), (11, CPU)]
)
def test_devices_of_capsules(memory, device_type, device):
    producer = Capsules(memory, device_type=device_type, device_id=1)
    view = library_of(producer).view(producer)
    assert view.device == device
    assert library_of(producer).current_stream(device) == (None if device == CPU else 1)


def test_misaligned_capsules_are_copied_on_the_host_and_refused_on_devices():
    raw = np.arange(41, dtype=np.uint8)
    expected = raw[1:].view(np.float32).copy()
    where = {"data": raw.ctypes.data + 1}
    producer = Capsules(expected, **where)
    view = library_of(producer).view(producer)
    assert view.copied == "its memory is not aligned to the element size"
    assert view.ndarray().tobytes() == expected.tobytes()
    with pytest.raises(ArrayError, match=r"on cuda:0 is not aligned"):
        import_array(Capsules(expected, device_type=2, **where))


@pytest.mark.parametrize(
    "error", [BufferError("not today"), TypeError("'NoneType' object is not iterable")], ids=str
)
def test_a_producers_error_is_passed_on(memory, error):
    """A TypeError, too, may be of its own: an old capsule in its place would not show that the array is read-only."""

    class Failing(Capsules):
        def __dlpack__(self, *, stream=None, max_version=None):
            if max_version is not None:
                raise error
            self.name, self.struct = b"dltensor", _Tensor()
            return self.capsule()

    with pytest.raises(ArrayError, match=f"Failing cannot be exported .*{error}"):
        lowprec.matmul(memory, memory.T, out=Failing(memory))


@pytest.mark.parametrize("make", [OldCapsules, lambda m: DLPackOnly(OldCapsules(m))])
def test_producers_without_versions_are_asked_twice_each_time(memory, make):
    """Also behind another object that passes the keywords on."""
    producer = make(memory)
    for _ in range(2):
        assert library_of(producer).view(producer).address == memory.ctypes.data


@pytest.mark.parametrize(
    "device", [("cpu", 0), (1,), (1, 0, 0), None, 1, (1.5, 0), (None, None), ("2", 0)], ids=str
)
def test_devices_that_are_none_are_refused(memory, device):
    producer = Capsules(memory)
    producer.__class__ = type("Misled", (Capsules,), {"__dlpack_device__": lambda self: device})
    with pytest.raises(ArrayError, match=r"Misled has no DLPack device"):
        library_of(producer).view(producer)
    with pytest.raises(ArrayError, match=r"Misled has no DLPack device"):
        lowprec.linalg.solve(producer, producer)
    assert producer.deleted == 0


@pytest.mark.parametrize(("says", "is_on"), [(1, 2), (2, 1), (2, 10)])
def test_a_device_that_is_not_that_of_the_memory_is_refused(memory, says, is_on):
    """The one decides which stream the data are ready on, the other which memory is read."""
    producer = Capsules(memory, device_type=is_on)
    producer.__class__ = type("Misled", (Capsules,), {"__dlpack_device__": lambda self: (says, 0)})
    with pytest.raises(ArrayError, match=r"reports .* as its device but exports memory on "):
        library_of(producer).view(producer)
    gc.collect()
    assert producer.deleted == 1


def test_an_argument_is_exported_once_in_a_call(memory):
    """A second export might differ from the one that was checked."""
    producer = Capsules(memory)
    np.testing.assert_array_equal(lowprec.matmul(producer, memory.T), memory @ memory.T)
    gc.collect()
    assert producer.deleted == 1


def test_two_devices_are_reported_by_the_names_of_the_function_called(memory):
    class Elsewhere(Capsules):
        shape, dtype, ndim = (3, 4), np.dtype(np.float32), 2

        def __array_namespace__(self):
            return types.SimpleNamespace(
                permute_dims=lambda x, order: x, reshape=lambda x, shape: x
            )

    elsewhere = Elsewhere(memory, device_type=2)
    with pytest.raises(DeviceError, match=r"^a is on cpu and b on cuda:0"):
        lowprec.matmul(memory, elsewhere)
    with pytest.raises(DeviceError, match=r"^x is on cpu and weight on cuda:0"):
        lowprec.linear(memory, elsewhere)
    with pytest.raises(DeviceError, match=r"^operands\[2\] is on cuda:0 and operands\[0\] on cpu"):
        lowprec.einsum("ij,jk,kl->il", memory, memory.T, elsewhere)


def test_torch_tensors_whose_storage_is_freed_are_refused(torch):
    freed = torch.ones(3, 3)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ArrayError, match=r"its storage has been freed, as FSDP does"):
        lowprec.matmul(freed, torch.ones(3, 3))


@ALL_DTYPES
def test_dlpack_array_is_read_by_torch_under_its_true_type(torch, dtype):
    array = DLPackArray(sample(dtype))
    tensor = torch.from_dlpack(array)
    assert str(tensor.dtype) == f"torch.{dtype}"
    assert tensor.data_ptr() == pointer(array)
    assert load_or_skip(Backend.TORCH).to_numpy(tensor).tobytes() == sample(dtype).tobytes()


@pytest.mark.parametrize("max_version", [None, (0, 8), (1, 0), (1, 3)])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT8_E5M2], ids=str)
def test_dlpack_array_exports_every_version(dtype, max_version):
    array = DLPackArray(sample(dtype))
    capsule = array.__dlpack__(max_version=max_version)
    assert ("versioned" in repr(capsule)) == (max_version is not None and max_version[0] >= 1)
    view = view_of_capsule(capsule)
    assert (view.dtype, view.address, view.copied) == (dtype, pointer(array), None)
    copy = view_of_capsule(array.__dlpack__(max_version=max_version, copy=True))
    assert copy.address != pointer(array)
    assert copy.ndarray().tobytes() == sample(dtype).tobytes()


def test_dlpack_array_keywords():
    array = DLPackArray(sample(DType.BFLOAT16))
    assert array.__dlpack_device__() == (1, 0)
    assert (array.shape, array.ndim, array.size) == ((5, 3), 2, 15)
    assert (array.dtype, array.device) == ("bfloat16", CPU)
    assert array.__dlpack__(dl_device=(1, 0), stream=-1) is not None
    with pytest.raises(BufferError, match="host memory has no stream"):
        array.__dlpack__(stream=2)
    with pytest.raises(BufferError, match=r"not exported to device \(2, 0\)"):
        array.__dlpack__(dl_device=(2, 0))
    assert np.asarray(array, np.float32).tolist() == sample(DType.FLOAT32).tolist()
    assert np.array(array, copy=True).ctypes.data != np.asarray(array).ctypes.data
    with pytest.raises(ValueError, match="conversion from bfloat16 to float32 needs a copy"):
        np.asarray(array, np.float32, copy=False)
    with pytest.raises(DTypeError, match="'int64' is not supported"):
        DLPackArray(np.zeros(3, np.int64))


def test_dlpack_array_of_read_only_memory():
    values = sample(DType.BFLOAT16)
    values.flags.writeable = False
    array = DLPackArray(values)
    assert view_of_capsule(array.__dlpack__(max_version=(1, 0))).read_only
    with pytest.raises(BufferError, match=r"read-?only"):
        array.__dlpack__()


def test_an_export_keeps_the_memory_until_its_consumer_is_done(torch):
    values = np.ones((5, 3), NUMPY_DTYPES[DType.BFLOAT16])  # not a view: nothing else owns it
    alive = weakref.ref(values)
    tensor = torch.from_dlpack(DLPackArray(values))
    del values
    gc.collect()
    assert alive() is not None
    assert tensor.float().sum() == 15
    del tensor
    gc.collect()
    assert alive() is None


@pytest.mark.usefixtures("torch", "jax")
def test_exports_that_outlive_the_interpreter_do_no_harm():
    """Arrays that adopted lowprec's memory and are still alive at exit, in modules and in cycles."""
    code = """
import sys, numpy as np, torch, jax, ml_dtypes
from lowprec.arrays import DLPackArray
def array(): return DLPackArray(np.ones((1000, 10), ml_dtypes.bfloat16))
kept = [array() for _ in range(3)], [torch.from_dlpack(array()) for _ in range(3)]
adopted = [jax.dlpack.from_dlpack(array()) for _ in range(3)]
capsule = array().__dlpack__(max_version=(1, 0))
sys.kept = kept, adopted, capsule
torch.kept = adopted
cycle = [adopted]; cycle.append(cycle)
"""
    run_python(code, warn="error")
