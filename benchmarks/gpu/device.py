"""Machine, device, driver and libraries; nothing about their owner.

Facts without an import are first: an import that hangs must not lose the driver's version.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path

import common

from gpu.parts import Options, Part, short

PACKAGES = (
    "numpy", "ml_dtypes", "torch", "triton", "cupy-cuda13x", "cupy-cuda12x", "jax", "jaxlib",
    "jax-cuda13-plugin", "nvmath-python", "cuda-core", "cuda-bindings", "cuda-pathfinder",
    "nvidia-cublas", "nvidia-cuda-nvrtc", "pytest",
)  # fmt: skip

#: Questions to nvidia-smi, which only reads.
_QUERIES = (
    "name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit",
    "temperature.gpu", "persistence_mode",
)  # fmt: skip


def device(part: Part, options: Options) -> None:
    """Describe the machine: first without imports, then with lowprec's, then with all libraries'."""
    part.fact("nvidia_files", len(list(Path("/dev").glob("nvidia[0-9]*"))))
    part.fact("nvidia_smi", nvidia_smi())
    part.fact("load_before", common.load_average())
    part.fact("versions", common.versions(PACKAGES))
    part.fact("name", slug(part.facts["nvidia_smi"].get("name") or "none"))
    part.fact("gpu", None)
    for look in (_machine, _gpu, _first_use, _info):
        try:
            look(part)
        except Exception as error:  # noqa: BLE001 - the report shows it
            part.fact(f"error, {look.__name__.strip('_')}", short(error))
    if not part.facts["gpu"]:
        part.fact("why_no_gpu", part.facts.get("error, gpu") or "lowprec sees no device")


def _machine(part: Part) -> None:
    described = common.describe()
    described["versions"] |= part.facts["versions"]
    name = part.facts["name"]
    part.facts |= described | {"name": f"none-{described['name']}" if name == "none" else name}
    part.save()


def _gpu(part: Part) -> None:
    """Describe the devices as lowprec's backend sees them."""
    from lowprec.backends.cuda.backend import info

    described = info()
    if described["devices"]:
        part.fact("gpu", {"devices": described["devices"], **described["versions"]})
        part.fact("name", slug(described["devices"][0]["name"]))


def _first_use(part: Part) -> None:
    """Create a context and a handle: the first of a machine take longest, and the next parts have less time."""
    from lowprec.backends.cuda import bindings, runtime

    begin = time.monotonic()
    runtime.call("cudaFree", 0)
    bindings.create_handle()
    part.fact("first_use_s", time.monotonic() - begin)


def _info(part: Part) -> None:
    import lowprec

    part.fact("lowprec_info", lowprec.info())


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
    program = shutil.which("nvidia-smi") or "/usr/local/nvidia/bin/nvidia-smi"
    command = [program, f"--query-gpu={','.join(_QUERIES)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        values = [word.strip() for word in done.stdout.splitlines()[0].split(",")]
    except (OSError, subprocess.SubprocessError, IndexError):
        return {}
    return dict(zip(_QUERIES, values, strict=False))
