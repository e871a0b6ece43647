"""Which machine, device, driver and libraries; nothing about who owns them."""

from __future__ import annotations

import re
import subprocess
from importlib import metadata
from typing import Any

import machine

from gpu import libraries
from gpu.parts import Options, Part

PACKAGES = (
    "numpy", "ml_dtypes", "torch", "triton", "cupy-cuda13x", "cupy-cuda12x", "jax", "jaxlib",
    "jax-cuda13-plugin", "nvmath-python", "cuda-core", "cuda-bindings", "cuda-pathfinder",
    "nvidia-cublas", "nvidia-cuda-nvrtc", "platformdirs", "mkl", "numba", "pytest", "matplotlib",
)  # fmt: skip

#: What nvidia-smi is asked for; it only reads.
_QUERIES = (
    "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit",
    "temperature.gpu", "persistence_mode",
)  # fmt: skip


def run(part: Part, options: Options) -> None:
    """Describe the machine."""
    described = machine.describe()
    described["load_before"] = machine.load_average()
    described["versions"] = {"lowprec": described["versions"]["lowprec"], **versions()}
    described["name"], described["gpu"] = machine.slug(), None
    for name, value in described.items():
        part.fact(name, value)
    if part.device == "gpu":
        part.fact("gpu", _gpu())
        part.fact("name", slug(part.facts["gpu"]["devices"][0]["name"]))
    else:
        part.fact("why_no_gpu", libraries.why_no_gpu())
        part.fact("name", f"none-{machine.slug()}")
    part.fact("lowprec_info", _lowprec_info())


def slug(name: str) -> str:
    """Return a device's name for a file.

    Examples
    --------
    >>> slug("NVIDIA H200"), slug("NVIDIA A100-SXM4-80GB")
    ('h200', 'a100-sxm4-80gb')
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "-".join(w for w in words if w not in ("nvidia", "geforce")) or "gpu"


def versions() -> dict[str, str]:
    """Return the versions of what is installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    # A wheel that is only on the path has no place in the environment, but it has a version.
    for name in ("torch", "cupy", "jax", "nvmath"):
        module = libraries.optional(name)
        version = getattr(module, "__version__", None)
        if version:
            found[f"{name} (imported)"] = str(version)
    return found


def _lowprec_info() -> Any:
    import lowprec

    try:
        return lowprec.info()
    except Exception as error:  # noqa: BLE001 - the report says what it was
        return libraries.short(error)


def _gpu() -> dict[str, Any]:
    from lowprec.backends.cuda import facts

    return {"devices": facts.devices(), **facts.versions(), "nvidia_smi": nvidia_smi(), **_torch()}


def _torch() -> dict[str, Any]:
    torch = libraries.optional("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    found = torch.cuda.get_device_properties(0)
    return {"torch_cuda": torch.version.cuda, "l2_bytes": getattr(found, "L2_cache_size", None)}


def nvidia_smi() -> dict[str, str]:
    """Return clocks and driver as nvidia-smi reads them; nothing where it is missing."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERIES)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [word.strip() for word in done.stdout.splitlines()[0].split(",")]
    return dict(zip(_QUERIES, values, strict=False))
