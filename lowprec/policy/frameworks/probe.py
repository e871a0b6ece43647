"""One small product of each library, by which it tells whether its switch lowers the precision."""

from __future__ import annotations

import sys
from typing import Any

from lowprec.arrays.torch_interception import probes_of
from lowprec.policy import environment

#: Rounds to 1 in TF32 and in bfloat16, so that a product of such numbers tells which it was.
_ABOVE_ONE = 1 + 2.0**-12
#: Libraries multiply small matrices in full FP32 whatever the switch says; this is enough for all that are known.
_SIZE = 128
_FULL = "float32 products on this CPU stay in full FP32"


def torch_leaves(torch: Any) -> str | None:
    """Return what PyTorch's switches leave alone as they are set now, "" for nothing, None if that cannot be told."""
    if torch.cuda.is_initialized():
        return _gpu_leaves(torch)
    if torch.cuda.device_count() or any(probe() for probe in probes_of(torch)[:4]):
        return None  # the GPU is what counts, or a tracer would see the product
    x = torch.full((_SIZE, _SIZE), _ABOVE_ONE, dtype=torch.float32, device="cpu")
    return "" if float((x @ x)[0, 0]) == _SIZE else _FULL


def _gpu_leaves(torch: Any) -> str | None:
    """Answer without a product, for which the stream would have to be waited for: every GPU since Ampere has TF32."""
    if torch.version.hip:
        return None
    if torch.cuda.get_device_capability() < (8, 0):
        return "this GPU has no TF32: float32 products stay in full FP32"
    return (
        "NVIDIA_TF32_OVERRIDE=0 keeps cuBLAS from TF32" if environment.snapshot().tf32_off else ""
    )


def jax_leaves(jax: Any) -> str | None:
    """Return what JAX's switch leaves alone, as :func:`torch_leaves`; JAX is not initialised for it."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    initialised = getattr(bridge, "backends_are_initialized", None)
    if initialised is None or not initialised() or jax.default_backend() != "cpu":
        return None
    with jax.ensure_compile_time_eval():
        x = jax.numpy.full((_SIZE, _SIZE), _ABOVE_ONE, "float32")
        return "" if float((x @ x)[0, 0]) == _SIZE else _FULL
