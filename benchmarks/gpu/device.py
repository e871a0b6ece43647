"""Which machine, device, driver and libraries; nothing about who owns them.

What costs nothing is told first: an import that hangs must not take the driver's version along.
"""

from __future__ import annotations

import re
import subprocess

import machine

from gpu.libraries import optional
from gpu.parts import Options, Part, short

PACKAGES = (
    "numpy", "ml_dtypes", "torch", "triton", "cupy-cuda13x", "cupy-cuda12x", "jax", "jaxlib",
    "jax-cuda13-plugin", "nvmath-python", "cuda-core", "cuda-bindings", "cuda-pathfinder",
    "nvidia-cublas", "nvidia-cuda-nvrtc", "platformdirs", "pytest",
)  # fmt: skip

#: What nvidia-smi is asked for; it only reads.
_QUERIES = (
    "name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit",
    "temperature.gpu", "persistence_mode",
)  # fmt: skip


def run(part: Part, options: Options) -> None:
    """Describe the machine: first without imports, then with lowprec's, then with everybody's."""
    part.fact("nvidia_smi", nvidia_smi())
    part.fact("load_before", machine.load_average())
    part.fact("versions", machine.versions(PACKAGES))
    name = part.facts["nvidia_smi"].get("name")
    part.fact("name", slug(name) if name else f"none-{machine.slug()}")
    try:
        from lowprec.backends import cuda

        found = cuda.info()
        part.fact("gpu", {"devices": found["devices"], **found["versions"]})
        part.fact("name", slug(part.facts["gpu"]["devices"][0]["name"]))
    except Exception as error:  # noqa: BLE001 - the report says what it was
        part.fact("why_no_gpu", short(error))
        part.fact("gpu", None)
    import lowprec

    described = machine.describe()
    described["versions"] |= part.facts["versions"]
    part.facts |= described | {"name": part.facts["name"]}
    try:
        part.fact("lowprec_info", lowprec.info())
    except Exception as error:  # noqa: BLE001 - the report says what it was
        part.fact("lowprec_info", short(error))
    for library in ("torch", "cupy", "jax", "nvmath"):
        # A wheel that is only on the path has no place in the environment, but it has a version.
        version = getattr(optional(library), "__version__", None)
        part.facts["versions"] |= {f"{library} (imported)": str(version)} if version else {}
        part.save()
    torch = optional("torch")
    if part.facts["gpu"] and torch is not None and torch.cuda.is_available():
        part.fact("torch_cuda", torch.version.cuda)
        found = torch.cuda.get_device_properties(0)
        part.fact("l2_bytes", getattr(found, "L2_cache_size", None))


def slug(name: str) -> str:
    """Return a device's name for a file.

    Examples
    --------
    >>> slug("NVIDIA H200"), slug("NVIDIA A100-SXM4-80GB")
    ('h200', 'a100-sxm4-80gb')
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "-".join(w for w in words if w not in ("nvidia", "geforce")) or "gpu"


def nvidia_smi() -> dict[str, str]:
    """Return name, clocks and driver as nvidia-smi reads them; nothing where it is missing."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERIES)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        values = [word.strip() for word in done.stdout.splitlines()[0].split(",")]
    except (OSError, subprocess.SubprocessError, IndexError):
        return {}
    return dict(zip(_QUERIES, values, strict=False))
