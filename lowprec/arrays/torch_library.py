"""PyTorch tensors, and the mechanisms of PyTorch that intercept operations.

A ``TorchDispatchMode`` may replace the result of an operation (``FakeTensorMode``), record it (``make_fx``) or count it
(``FlopCounterMode``); ``torch.jit.trace`` records; ``torch.func`` wraps. A product by address is not an operation of
torch, so they would see only the allocation of its result.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable
from types import MethodType
from typing import Any

from lowprec.arrays.base import Delegate, Library
from lowprec.arrays.view import CPU, ArrayView, Device, stand_in
from lowprec.errors import ArrayError
from lowprec.formats import DType, dtype_from_name
from lowprec.util.strides import Shape, contiguous_strides

#: Smallest result, in bytes, for which huge pages are requested; the same as in NumPy.
LARGE_BYTES = 4 << 20


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Return the C function, None on systems without huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def request_huge_pages(address: int, nbytes: int) -> None:
    madvise = _madvise()
    if madvise is None:
        return
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    # A failure costs only speed.
    madvise(first, last - first, mmap.MADV_HUGEPAGE)


# DLPack device types of torch's; types without memory addresses (meta, xla, ...) are absent.
_DEVICE_TYPES = {"cpu": 1, "cuda": 2, "mps": 8, "privateuseone": 12, "xpu": 14}
_ROCM = 10

_RECORDED = (
    "the torch tensor requires grad, and only lowprec.matmul records a gradient; pass tensor.detach(), or call inside "
    "torch.no_grad()"
)
_DUAL = (
    "the torch tensor has a tangent of forward-mode AD, which only lowprec.matmul propagates; pass "
    "torch.autograd.forward_ad.unpack_dual(tensor).primal"
)


class TorchLibrary(Library):
    """PyTorch tensors. PyTorch records, transforms or traces the products of some of them itself."""

    name = "torch"
    delegates = True

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._torch_dtypes = {d: getattr(torch, d.label) for d in DType if hasattr(torch, d.label)}
        self._dtypes = {t: d for d, t in self._torch_dtypes.items()}
        self._grad_enabled = torch.is_grad_enabled
        self._probes = _probes_of(torch)
        self._forward_ad = torch.autograd.forward_ad
        self._device_types = dict(_DEVICE_TYPES)
        if getattr(torch.version, "hip", None):
            self._device_types["cuda"] = _ROCM
        self.device_of = functools.cache(self._device_of)
        #: The classes whose tensors have memory of their own.
        self._plain = {torch.Tensor, torch.nn.Parameter}
        # The allocator for torch's compiled code takes a third of the time of `new_empty`; older versions lack it.
        guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
        self._empty_on_cpu = getattr(guards, "_empty_strided_cpu", None)
        # The function that torch's compiler uses: 0.1 us, because it does not create a torch.cuda.Stream.
        self._raw_stream = getattr(
            torch._C,
            "_cuda_getCurrentRawStream",
            lambda i: torch.cuda.current_stream(i).cuda_stream,
        )

    def check_type(self, array: Any) -> None:
        """Raise ArrayError for subclasses of Tensor that may have no memory of their own and are no operands."""
        kind = type(array)
        tensor = self._torch.Tensor
        parameter = self._torch.nn.Parameter
        if kind in self._plain or kind.__torch_dispatch__ is not tensor.__torch_dispatch__:
            return
        if getattr(kind, "__torch_function__", None) not in (
            parameter.__torch_function__,
            MethodType(tensor.__torch_function__.__func__, kind),
        ):
            raise ArrayError(self.refusal(array))
        self._plain.add(kind)  # a subclass that only adds attributes

    def refusal(self, array: Any) -> str:
        """Return why a tensor of another class than PyTorch's own has no memory to read; "" for other tensors."""
        kind = type(array)
        return "" if kind in self._plain else (
            f"{kind.__module__}.{kind.__qualname__} is not accepted: a tensor subclass may have no memory of its "
            "own; pass a plain tensor (tensor.full_tensor() of a DTensor, tensor.dequantize() of a quantised one, "
            "those of tensor.unbind() of a nested one, tensor.as_subclass(torch.Tensor) if the subclass has memory)"
        )  # fmt: skip

    def delegate(self, *arrays: Any) -> Delegate | None:
        """Return PyTorch's product if it must record, transform or trace it, or the tensors have no memory."""
        dispatch_modes, function_modes, is_tracing, transforms = self._probes
        if dispatch_modes() or function_modes() or is_tracing() or transforms():
            why = _interception(self._torch)
            if why:
                return Delegate("torch", why)
        records = self._grad_enabled()
        has_level = self._forward_ad._current_level >= 0
        for array in arrays:
            if type(array) not in self._plain:
                return Delegate("torch", self.refusal(array))
            if has_level and _has_tangent(self._torch, array):
                return Delegate("torch", _DUAL)
            if array.requires_grad and records:
                return Delegate("torch", _RECORDED)
            if array.is_meta:
                return Delegate(
                    "torch", "the torch tensor is on device 'meta', where it has no memory"
                )
        return None

    def describe(self, array: Any) -> ArrayView:
        """Return the view of a tensor; lazy conjugation and negation are resolved first."""
        copied = None
        dtype = self._dtypes.get(array.dtype)
        if dtype is None:
            if array.is_quantized:
                raise ArrayError("the torch tensor is quantised; pass tensor.dequantize()")
            dtype = dtype_from_name(str(array.dtype).removeprefix("torch."))  # raises
        if type(array) not in self._plain:
            return self._without_address(array, dtype)
        if array.is_neg() or (dtype.is_complex and array.is_conj()):
            array = array.resolve_conj().resolve_neg()
            copied = "its lazy conjugation or negation was resolved"
        try:
            address = array.data_ptr()
            shape = tuple(array.shape)
            strides = array.stride()
        except RuntimeError:
            return self._without_address(array, dtype)
        device: Device | None = CPU
        if not array.is_cpu:
            device = self.device_of(array.device)
        if device is None or (not address and 0 not in shape):
            return self._without_address(array, dtype)
        return ArrayView(dtype, shape, strides, device, array, False, address, copied)

    def _without_address(self, array: Any, dtype: DType) -> ArrayView:
        """Return the view of a tensor wrapped by a transform that has ended, or the description of another one."""
        unwrapped = self._torch._C._functorch.unwrap_if_dead(array)
        if unwrapped is not array:
            return self.describe(unwrapped)
        strided = array.layout is self._torch.strided and not array.is_nested
        if not strided or self.delegate(array) is None:
            raise self._without_memory(array) from None
        return ArrayView.description(dtype, tuple([_extent(n) for n in array.shape]))

    def mark_written(self, array: Any) -> None:
        """Increment the tensor's version, by which autograd detects writes to tensors saved for a backward pass."""
        if array.is_inference() and not self._torch.is_inference_mode_enabled():
            raise ArrayError(
                "out was made in inference mode, outside of which PyTorch writes no such tensor; pass out.clone(), "
                "or call inside torch.inference_mode()"
            )
        self._torch.autograd.graph.increment_version(array)

    def allocate(self, shape: Shape, dtype: DType, device: Device, like: Any) -> ArrayView:
        torch_dtype = self._torch_dtypes[dtype]
        strides = contiguous_strides(shape)
        if device is CPU and self._empty_on_cpu is not None:
            array = self._empty_on_cpu(shape, strides, torch_dtype)
        else:
            array = like.new_empty(shape, dtype=torch_dtype)
        address = array.data_ptr()
        if not address and 0 not in shape:
            raise self._without_memory(array)
        view = ArrayView(dtype, shape, strides, device, array, False, address)
        if device is CPU and (nbytes := view.nbytes) >= LARGE_BYTES:
            request_huge_pages(address, nbytes)
        return view

    def current_stream(self, device: Device) -> int | None:
        if device.type != self._device_types["cuda"]:
            return None
        return self._raw_stream(device.index) or 1

    def _device_of(self, device: Any) -> Device | None:
        """Return the DLPack device of a ``torch.device``, None if its memory has no addresses."""
        kind = self._device_types.get(device.type)
        if kind is None:
            return None
        if kind == CPU.type:
            return CPU
        return Device(kind, device.index or 0)

    def _without_memory(self, array: Any) -> ArrayError:
        if array.is_nested:
            return ArrayError(
                "the torch tensor is nested; multiply its parts, from tensor.unbind()"
            )
        if array.layout is not self._torch.strided:
            return ArrayError(f"the torch tensor has layout {array.layout}; pass tensor.to_dense()")
        if self.device_of(array.device) is None:
            return ArrayError(
                f"the torch tensor is on device {str(array.device)!r}, whose memory cannot be read; move it to the CPU "
                "or a GPU"
            )
        return ArrayError(
            "the torch tensor has no memory of its own: its storage has been freed, as FSDP does between uses (see "
            "FSDP.summon_full_params), or its elements are in another tensor; pass a tensor with storage"
        )


def _extent(extent: Any) -> int:
    """Return an extent as a number for checks; the example of a symbol, if it has one."""
    example = getattr(getattr(extent, "node", None), "hint", None)
    return stand_in(extent if example is None else int(example))


def _probes_of(torch: Any) -> tuple[Callable[[], Any], ...]:
    """Return functions of torch that are true if an interception may be active; 20 to 50 ns each."""
    core = torch._C
    return (
        core._len_torch_dispatch_stack,
        core._len_torch_function_stack,
        core._is_tracing,  # torch.jit.trace
        core._are_functorch_transforms_active,
    )


def _interception(torch: Any) -> str:
    """Return the interception that would miss the product; "" if there is none, or only function modes."""
    if torch._C._is_tracing():
        raise ArrayError(
            "torch.jit.trace is recording, and would record an empty result for lowprec's product; call lowprec "
            "outside the traced function"
        )
    if torch._C._are_functorch_transforms_active():
        return (
            "the call is inside a torch.func transform (vmap, grad, jvp, functionalize), which acts on torch's "
            "operations; call lowprec outside the transform"
        )
    mode = torch.utils._python_dispatch._get_current_dispatch_mode()
    # The stack of pre-dispatch modes is global; the dispatch key shows whether they are active in this thread.
    if mode is None and torch._C._dispatch_tls_is_dispatch_key_included(
        torch._C.DispatchKey.PreDispatch
    ):
        mode = torch._ops._get_current_dispatch_mode_pre_dispatch()
    if mode is None:
        return ""
    return (
        f"the torch mode {type(mode).__name__} is active: it acts on torch's operations and would not see lowprec's "
        "product; call lowprec outside the mode"
    )


def _has_tangent(torch: Any, array: Any) -> bool:
    """Whether a tensor has a tangent at the current level of forward-mode AD."""
    core = torch._C
    if core._dispatch_tls_is_dispatch_key_excluded(core.DispatchKey.AutogradFunctionality):
        return False
    return torch.autograd.forward_ad.unpack_dual(array).tangent is not None
