"""Compile the CPU kernels: hatchling's build hook, and a command for a checkout (`python hatch_build.py`).

The compiler is $CXX, c++, g++ or clang++, or zig's from the package index where there is none. The library needs no C++
runtime and is loaded by ctypes, so wheels are `py3-none-PLATFORM`. Variables:

LOWPREC_BUILD: `require` makes a build without the library an error; `none` omits it.
LOWPREC_BUILD_TARGET: zig's target and the wheel's platform, such as "aarch64-linux-gnu.2.17 manylinux2014_aarch64".
"""

from __future__ import annotations

import concurrent.futures
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
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
    "-ffp-contract=off -fno-asynchronous-unwind-tables"
)
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
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name.lower().partition("-")[0], name.lower().partition("-")[0])


def is_supported() -> bool:
    """Whether kernels exist for this Python."""
    machines = SYSTEMS.get(sys.platform, ("", {}))[1]
    return architecture(platform.machine()) in machines and struct.calcsize("P") == 8


def system_compiler() -> list[str] | None:
    """Return the command of this system's C++ compiler; None if there is none, or zig is to be used."""
    names = [os.environ.get("CXX"), *(() if sys.platform == "win32" else ("c++", "g++", "clang++"))]
    commands = [shlex.split(name) for name in names if name and "LOWPREC_BUILD_TARGET" not in os.environ]
    return next((command for command in commands if shutil.which(command[0])), None)


def sources_hash() -> int:
    """Return the hash that the library reports; `library.py` compares it with that of the checkout's sources."""
    files = [*(x for x in sorted(NATIVE.iterdir()) if x.suffix in (".cpp", ".hpp", ".h")), Path(__file__)]
    return zlib.crc32(b"".join(x.read_bytes() for x in files))


def run(command: list[str]) -> str:
    """Return the output of a command; raise BuildError with its first error, or its last line, if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        lines = [x.strip() for x in (done.stderr + done.stdout).splitlines() if x.strip()] or ["no message"]
        first = next((x for x in lines if "error:" in x or "undefined reference" in x), lines[-1])
        raise BuildError(f"{' '.join(command[:3])}: {first}")
    return done.stdout.strip()


def compile_sources(command: list[str], sources: list[Path]) -> list[str]:
    """Compile files in parallel; return the objects, which are kept in `build/kernels` by command and contents."""
    headers = b"".join(x.read_bytes() for x in sorted({y for x in sources for y in x.parent.glob("*.h*")}))

    def compile_one(source: Path) -> str:
        key = zlib.crc32(" ".join(command).encode() + headers + source.read_bytes())
        made = OBJECTS / f"{source.stem}-{key:08x}.o"
        if not made.exists():
            temporary = made.with_suffix(f".{os.getpid()}")
            run([*command, "-c", str(source), "-o", str(temporary)])
            temporary.replace(made)
        return str(made)

    OBJECTS.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, sources))


def build() -> tuple[Path, str]:
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
    compiler = compiler or [sys.executable, "-m", "ziglang", "c++", *(["-target", triple] if triple else [])]
    name, platforms, options = SYSTEMS[system]
    made_for = architecture(triple or run([*compiler, "-dumpmachine"]))
    tag = tag or platforms.get(made_for, "")
    if not tag:
        raise BuildError(f"there are none for {system} on {made_for}")
    version = sources_hash()
    if triple or made_for != architecture(platform.machine()):
        target = Path(tempfile.mkdtemp()) / name  # the source tree's library is for this machine
    else:
        target = NATIVE.parent / name
        if target.is_file() and f"lowprec {version:#x}".encode() in target.read_bytes():
            return target, tag
    link = ["-shared", *options]
    if system == "linux":
        link += ["-Wl,-z,defs", "-Wl,-s"]
    if is_zig or system == "darwin":
        link += ["-nostdlib++"]
    elif system == "linux":
        link += ["-nodefaultlibs", "-lc", "-lpthread", "-lgcc"]

    command, sources = [*compiler, *OPTIONS, *options], sorted(NATIVE.glob("*.cpp"))
    stamped = NATIVE / "cpu.cpp"
    objects = compile_sources(command, [x for x in sources if x != stamped])
    objects += compile_sources([*command, f"-DLP_VERSION={version:#x}"], [stamped])
    made = target.with_name(f"{name}.{os.getpid()}")
    try:
        run([*compiler, "-o", str(made), *objects, *link])
        made.replace(target)
    finally:
        made.unlink(missing_ok=True)
    return target, tag


class CustomBuildHook(BuildHookInterface):
    """Hatchling's hook for wheels, editable ones included."""

    def dependencies(self) -> list[str]:
        """Return zig where no other compiler is."""
        needs = "LOWPREC_BUILD_TARGET" in os.environ or (is_supported() and system_compiler() is None)
        return [ZIG] if needs and os.environ.get("LOWPREC_BUILD") != "none" else []

    def initialize(self, version: str, build_data: dict) -> None:
        """Add the library to the wheel, or the reason why there is none."""
        reason = NATIVE.with_name("_kernels.txt")
        try:
            made, tag = build()
            reason.unlink(missing_ok=True)
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{tag}"
        except BuildError as error:
            if os.environ.get("LOWPREC_BUILD") == "require":
                raise
            self.app.display_warning(f"lowprec is built without kernels, products will run on NumPy: {error}")
            reason.write_text(f"{error}\n", encoding="utf-8")
            made = reason
        if version != "editable":
            build_data["force_include"][str(made)] = f"{PACKAGE}/{made.name}"


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{build()[0]}\n")
    except BuildError as error:
        sys.exit(f"lowprec: built without kernels: {error}")
