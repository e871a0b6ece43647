"""Compile the CPU kernels: hatchling's build hook, and a command for a checkout (`python hatch_build.py`).

The compiler is $CXX, or c++, g++ or clang++ if recent enough, or zig's from the package index where there is none.
The library needs no C++ runtime and is loaded by ctypes, so wheels are `py3-none-PLATFORM`. A wheel has the units of
all processors; the command and an editable installation compile those of this one, and keep symbols. Variables:

LOWPREC_BUILD: `require` makes a build without the library an error; `none` omits it.
LOWPREC_BUILD_TARGET: zig's target and the wheel's platform, such as "aarch64-linux-gnu.2.17 manylinux2014_aarch64".
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import importlib.util
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # not needed for the command
    BuildHookInterface = object

ROOT = Path(__file__).resolve().parent
PACKAGE = "lowprec/backends/cpu"
NATIVE = ROOT / PACKAGE / "native"
OBJECTS = ROOT / "build" / "kernels"
ZIG = "ziglang>=0.13,<0.18"
OPTIONS = shlex.split(
    "-std=c++17 -O2 -fPIC -fvisibility=hidden -fno-exceptions -fno-rtti -fno-threadsafe-statics -fno-math-errno "
    "-ffp-contract=off -fno-tree-slp-vectorize -fno-asynchronous-unwind-tables"
)
#: The bits of `lp_unit` in files that a library may lack, and all units.
UNITS_IN = {
    "x86_avx2": 0b11, "x86_avxvnni": 1 << 2, "x86_avx512": 1 << 3, "x86_avx512bf16": 1 << 4, "x86_avx512vnni": 1 << 5,
    "x86_amx": 0b11 << 6,
}  # fmt: skip
ALL_UNITS = 0x7FF
#: What depends on the version and the units of a library.
STAMPED = ("api", "cpu", "lanewise")
#: What older compilers lack.
PROBE = """
typedef float four __attribute__((vector_size(16)));
four halves(four x, four y) { return __builtin_shufflevector(x, y, 0, 1, 4, 5); }
#if defined(__x86_64__)
__attribute__((target("avx512bf16,avxvnni,amx-int8"))) void tiles() {}
#endif
"""
#: By operating system: name of the library, platform of the wheel, options of all commands.
SYSTEMS = {
    "linux": ("_kernels.so", {"x86_64": "linux_x86_64", "aarch64": "linux_aarch64"}, []),
    "darwin": ("_kernels.dylib", {"x86_64": "macosx_11_0_x86_64", "aarch64": "macosx_11_0_arm64"},
               ["-mmacosx-version-min=11.0"]),
    "win32": ("_kernels.dll", {"x86_64": "win_amd64"}, []),
}  # fmt: skip


class BuildError(Exception):
    """The reason why there is no library."""


def architecture(name: str) -> str:
    """Return the architecture of a machine or a compiler's target, in Linux's names."""
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(
        name.lower().partition("-")[0], name.lower().partition("-")[0]
    )


def is_supported() -> bool:
    """Whether kernels exist for this Python."""
    machines = SYSTEMS.get(sys.platform, ("", {}))[1]
    return architecture(platform.machine()) in machines and struct.calcsize("P") == 8


def compiles(command: list[str]) -> bool:
    """Whether a compiler has what the sources need: `__builtin_shufflevector` came with GCC 12."""
    options = ["-std=c++17", "-x", "c++", "-c", "-", "-o", os.devnull]
    done = subprocess.run(
        [*command, *options], input=PROBE, capture_output=True, text=True, check=False
    )
    return done.returncode == 0


def system_compiler() -> list[str] | None:
    """Return the command of this system's C++ compiler; None if there is none that can, or zig is to be used."""
    if "LOWPREC_BUILD_TARGET" in os.environ:
        return None
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    names = () if sys.platform == "win32" else ("c++", "g++", "clang++")
    return next(([name] for name in names if shutil.which(name) and compiles([name])), None)


def sources_hash() -> int:
    """Return the hash that the library reports; `library.py` compares it with that of the checkout's sources."""
    files = [
        *(x for x in sorted(NATIVE.iterdir()) if x.suffix in (".cpp", ".hpp", ".h")),
        Path(__file__),
    ]
    return zlib.crc32(b"".join(x.read_bytes() for x in files))


def run(command: list[str]) -> str:
    """Return the output of a command; raise BuildError with its first error, or its last line, if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        lines = [x.strip() for x in (done.stderr + done.stdout).splitlines() if x.strip()] or [
            "no message"
        ]
        first = next((x for x in lines if "error:" in x or "undefined reference" in x), lines[-1])
        raise BuildError(f"{' '.join(command[:3])}: {first}")
    return done.stdout.strip()


def compile_sources(command: list[str], sources: list[Path]) -> list[str]:
    """Compile files in parallel; return the objects, which are kept in `build/kernels` by command and contents."""
    headers = b"".join(
        x.read_bytes() for x in sorted({y for x in sources for y in x.parent.glob("*.h*")})
    )

    started = time.monotonic()

    def compile_one(source: Path) -> str:
        key = zlib.crc32(" ".join(command).encode() + headers + source.read_bytes())
        made = OBJECTS / f"{source.stem}-{key:08x}.o"
        if not made.exists():
            temporary = made.with_suffix(f".{os.getpid()}")
            run([*command, "-c", str(source), "-o", str(temporary)])
            temporary.replace(made)
            # `pip install -v` shows this line.
            seconds = time.monotonic() - started
            sys.stderr.write(f"compiled {source.name} after {seconds:.0f} s\n")
            sys.stderr.flush()
        return str(made)

    OBJECTS.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, sources))


def units_to_build(command: list[str], link: list[str]) -> int:
    """Return the bits of the units of this processor, by the library's own code; all where it does not run."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        probe = Path(folder) / "units.so"
        try:
            run([*link, "-o", str(probe), *compile_sources(command, [NATIVE / "cpu.cpp"])])
            found = ctypes.CDLL(str(probe)).lp_units()
        except (BuildError, OSError, AttributeError):
            return ALL_UNITS
    absent = (bits for bits in UNITS_IN.values() if not bits & found)
    return ALL_UNITS - sum(absent)


def build(for_this_cpu: bool = False) -> tuple[Path, str]:
    """Compile the library unless there is one of these sources; return its path and the wheel's platform."""
    triple, _, tag = os.environ.get("LOWPREC_BUILD_TARGET", "").partition(" ")
    if os.environ.get("LOWPREC_BUILD") == "none":
        raise BuildError("LOWPREC_BUILD=none")
    if not triple and not is_supported():
        raise BuildError(f"there are none for {sys.platform} on {platform.machine()}")
    system = sys.platform
    if triple:
        system = "darwin" if "macos" in triple else "win32" if "windows" in triple else "linux"
    compiler = system_compiler()
    is_zig = compiler is None
    compiler = compiler or [
        sys.executable,
        "-m",
        "ziglang",
        "c++",
        *(["-target", triple] if triple else []),
    ]
    if is_zig and importlib.util.find_spec("ziglang") is None:
        reason = "there is no C++ compiler: install one, or zig's"
        if triple:
            reason = "a build for another system needs zig's"
        raise BuildError(f"{reason}: pip install '{ZIG}'")
    name, platforms, options = SYSTEMS[system]
    made_for = architecture(triple or run([*compiler, "-dumpmachine"]))
    tag = tag or platforms.get(made_for, "")
    if not tag:
        raise BuildError(f"there are none for {system} on {made_for}")
    link = [*compiler, "-shared", *options]
    libraries = []
    if system == "linux":
        link += ["-Wl,-z,defs", *([] if for_this_cpu else ["-Wl,-s"])]
    if is_zig or system == "darwin":
        link += ["-nostdlib++"]
    elif system == "linux":
        libraries = ["-nodefaultlibs", "-lc", "-lpthread", "-ldl", "-lgcc"]
    command = [*compiler, *OPTIONS, *options]
    units = ALL_UNITS
    is_native = not triple and made_for == architecture(platform.machine())
    if for_this_cpu and is_native:
        units = units_to_build(command, link)
    version = sources_hash()
    target = NATIVE.parent / name
    if not is_native:
        target = Path(tempfile.mkdtemp()) / name  # the source tree's library is for this machine
    elif target.is_file():
        stamps = (f"lowprec {version:#x} units {x:#x}\0" for x in (units, ALL_UNITS))
        present = target.read_bytes()
        if any(x.encode() in present for x in stamps):
            return target, tag

    sources = [x for x in sorted(NATIVE.glob("*.cpp")) if UNITS_IN.get(x.stem, ALL_UNITS) & units]
    objects = compile_sources(command, [x for x in sources if x.stem not in STAMPED])
    command += [f"-DLP_VERSION={version:#x}", f"-DLP_BUILT={units:#x}"]
    objects += compile_sources(command, [x for x in sources if x.stem in STAMPED])
    made = target.with_name(f"{name}.{os.getpid()}")
    try:
        run([*link, "-o", str(made), *objects, *libraries])
        made.replace(target)
    finally:
        made.unlink(missing_ok=True)
    return target, tag


class CustomBuildHook(BuildHookInterface):
    """Hatchling's hook for wheels, editable ones included."""

    def dependencies(self) -> list[str]:
        """Return zig where no other compiler is."""
        needs = "LOWPREC_BUILD_TARGET" in os.environ or (
            is_supported() and system_compiler() is None
        )
        return [ZIG] if needs and os.environ.get("LOWPREC_BUILD") != "none" else []

    def initialize(self, version: str, build_data: dict) -> None:
        """Add the library to the wheel, or the reason why there is none."""
        reason = NATIVE.with_name("_kernels.txt")
        try:
            made, tag = build(for_this_cpu=version == "editable")
            reason.unlink(missing_ok=True)
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{tag}"
        except BuildError as error:
            if os.environ.get("LOWPREC_BUILD") == "require":
                raise
            self.app.display_warning(
                f"lowprec is built without kernels, products will run on NumPy: {error}"
            )
            reason.write_text(f"{error}\n", encoding="utf-8")
            made = reason
        if version != "editable":
            build_data["force_include"][str(made)] = f"{PACKAGE}/{made.name}"


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build(for_this_cpu=True)[0]}\n")
    except BuildError as error:
        sys.exit(f"lowprec: built without kernels: {error}")
