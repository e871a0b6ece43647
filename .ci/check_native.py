"""Compile the CPU kernels with their checks, `tests/native/check.cpp`, and run them.

usage: check_native.py [NAME...]

native      every unit of this processor; AMX in software where it has none
fuzz        random products and roundings with buffers that end at protected pages, in other floating-point modes
haswell     the native program on an emulated Haswell: FP32 and int8 units must give the same bits
aarch64     compiled by zig, on three emulated processors: the same comparison
blas        the BLAS calls of programs of other systems, compiled by zig: with musl, and on an emulated AArch64
sanitized   under the address and undefined-behaviour sanitizers
threads     under the thread sanitizer
levels      no instruction of an instruction set is outside the files compiled for it
style       clang-format and clang-tidy
wheels      the wheels of a release in dist/, by zig; the code for this machine gives the bits of the system compiler's

Without a name: all but `threads` and `wheels`. A check whose program is missing prints a message and succeeds.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hatch_build import (  # noqa: E402
    ALL_UNITS,
    NATIVE,
    OBJECTS,
    OPTIONS,
    STAMPED,
    UNITS_IN,
    BuildError,
    architecture,
    compile_sources,
    run,
    system_compiler,
)  # fmt: skip

CHECKS = ROOT / "tests" / "native"
SANITIZERS = {
    "sanitized": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DLP_EXACT_MEMORY"],
    "threads": ["-fsanitize=thread"],
}
#: Files that AMX in software changes.
TILES = ("cpu.cpp", "x86_amx.cpp")


def zig() -> list[str] | None:
    """Return the command of zig's C++ compiler; None where it is not installed."""
    return [sys.executable, "-m", "ziglang", "c++"] if importlib.util.find_spec("ziglang") else None


def native_compiler() -> list[str]:
    """Return the command of a compiler for this machine."""
    found = system_compiler() or zig()
    if found is None:
        raise SystemExit("no C++ compiler: pip install ziglang")
    return found


def has_tiles() -> bool:
    """Whether this processor has AMX."""
    cpus = Path("/proc/cpuinfo")
    return cpus.is_file() and " amx_tile " in cpus.read_text()


def program(
    name: str,
    compiler: list[str],
    options: list[str],
    libraries: list[str],
    real_tiles: bool = False,
) -> str:
    """Compile and link the kernels with the checks, and with AMX in software unless it is real; return the path."""
    command, made = [*compiler, *options], OBJECTS / f"check-{name}"
    plain = [x for x in sorted(NATIVE.glob("*.cpp")) if x.name not in TILES]
    checks = [*(NATIVE / x for x in TILES), CHECKS / "check.cpp"]
    objects = compile_sources(command, plain)
    tiles = [] if real_tiles else ["-DLP_AMX_IN_SOFTWARE"]
    objects += compile_sources([*command, *tiles, f"-I{NATIVE}", f"-I{CHECKS}"], checks)
    run([*command, "-o", str(made), *objects, *libraries])
    return str(made)


def hashes(command: list[str], step: int, variants: int = 8, every: int = 1) -> dict[str, str]:
    """Run the checks, with every `step`-th k, 0 for threads alone, and every `every`-th problem.

    Return the hashes of problems by class and name.
    """
    done = subprocess.run(
        [*command, str(step), str(variants), str(every)],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [x for x in done.stderr.splitlines() if not x.startswith("qemu")]
    if done.returncode:
        raise SystemExit(
            "\n".join([*lines[:40], f"{' '.join(command)}: failed, status {done.returncode}"])
        )
    print(lines[-1])
    return dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())


def compare(name: str, found: dict[str, str]) -> None:
    """Fail unless problems of FP32 and int8 units have the hashes of this machine."""
    expected = check_native()
    common = [x for x in found if x.partition(" ")[0] in ("fp32", "int8") and x in expected]
    different = [x for x in common if found[x] != expected[x]]
    print(f"{name}: {len(common)} problems compared, {len(different)} different")
    if different or not common:
        raise SystemExit("\n".join(different[:20]) or f"{name}: nothing to compare")


def native() -> str:
    """Compile the checks for this processor, with the objects of the library."""
    return program("native", native_compiler(), OPTIONS, ["-lpthread"], has_tiles())


_expected: dict[str, str] = {}


def check_native() -> dict[str, str]:
    """Run the checks on this processor, once; return the hashes."""
    if not _expected:
        _expected.update(hashes([native()], 97))
    return _expected


def check_fuzz() -> None:
    """Run random products and roundings, 20,000 each."""
    done = subprocess.run(
        [native(), "random", "3", "10000"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(
            "\n".join([*done.stderr.splitlines()[:20], f"fuzz: failed, status {done.returncode}"])
        )
    print(done.stderr.splitlines()[-1])


def check_sanitized(name: str) -> None:
    """Run the checks under sanitizers."""
    options = ["-std=c++17", "-O1", "-g", "-ffp-contract=off", *SANITIZERS[name]]
    hashes(
        [program(name, native_compiler(), options, ["-lpthread"])],
        300 if name == "sanitized" else 0,
        4,
    )


#: Of so many problems one is computed by an emulator, which takes a hundred times as long as a processor.
EMULATED = 7


def emulator(machine: str) -> str | None:
    """Return the path of QEMU for programs of this machine; install it where that is possible."""
    names = (f"qemu-{machine}", f"qemu-{machine}-static")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        install("qemu-user-static")
        found = shutil.which(names[1])
    return found


def install(package: str) -> None:
    """Install a package of Debian where that is possible."""
    if not shutil.which("apt-get") or getattr(os, "geteuid", lambda: 1)():
        return
    for arguments in (
        ["update", "-qq"],
        ["install", "-qq", "-y", "--no-install-recommends", package],
    ):
        subprocess.run(
            ["apt-get", *arguments],
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def check_haswell() -> None:
    """Compare AVX2 on an emulated processor with this one."""
    qemu = emulator("x86_64")
    if qemu is None:
        print("haswell: no qemu-x86_64 here")
    else:
        compare("haswell", hashes([qemu, "-cpu", "Haswell", native()], 97, 1, EMULATED))


#: The target of wheels for AArch64, the package of Debian with its C library, and the loader in it.
AARCH64 = "aarch64-linux-gnu.2.17"
AARCH64_PACKAGE = "libc6-arm64-cross"
AARCH64_LOADER = Path("/usr/aarch64-linux-gnu/lib/ld-linux-aarch64.so.1")
MUSL = "x86_64-linux-musl"
MUSL_LOADER = Path("/lib/ld-musl-x86_64.so.1")


def aarch64_command() -> list[str]:
    """Return the command before a program of AArch64; empty where there is no emulator or no C library."""
    qemu = emulator("aarch64")
    if not qemu or not has(AARCH64_LOADER, AARCH64_PACKAGE):
        return []
    return [qemu, "-L", str(AARCH64_LOADER.parent.parent)]


def has(file: Path, package: str) -> bool:
    """Whether there is a file of a package of Debian, which is installed where that is possible."""
    if not file.exists():
        install(package)
    return file.exists()


def check_aarch64() -> None:
    """Compare NEON on emulated processors with this one."""
    compiler, emulated = zig(), aarch64_command()
    if compiler is None or not emulated:
        print("aarch64: no qemu-aarch64 here, no C library for it, or no zig")
        return
    made = program("aarch64", [*compiler, "-target", AARCH64], OPTIONS, ["-nostdlib++"])
    for cpu, variants in (("max", 3), ("neoverse-n1", 1), ("cortex-a72", 1)):
        compare(cpu, hashes([*emulated, "-cpu", cpu, made], 97, variants, EMULATED))


def check_blas() -> None:
    """Preload the library into a program that compares the results of a BLAS, whose functions only end the program."""
    compiler, emulated = zig(), aarch64_command()
    if compiler is None or architecture(platform.machine()) != "x86_64":
        print("blas: no zig here, or no x86-64")
        return
    if has(MUSL_LOADER, "musl"):
        run_blas(MUSL, [], 0b11)
    else:
        print("blas: no musl here")
    if emulated:
        run_blas(AARCH64, emulated, ALL_UNITS)
    else:
        print("blas: no qemu-aarch64 here, or no C library for it")


def run_blas(target: str, emulated: list[str], units: int) -> None:
    """Compile the library with these units for a target and preload it."""
    made = blas_program([*(zig() or []), "-target", target], units)
    variables = [f"LD_PRELOAD={made.with_name('libkernels.so')}", "LOWPREC_BLAS=bf16"]
    options = [word for x in variables for word in ("-E", x)]
    command = [*emulated, *options] if emulated else ["env", *variables]
    done = subprocess.run(
        [*command, str(made), str(2.0**-8)], capture_output=True, text=True, check=False
    )
    text = done.stdout + done.stderr
    lines = [x for x in text.splitlines() if "failures" in x or "taken," in x]
    print(f"{target}: {'; '.join(lines)}")
    if done.returncode or not any(": 1950 taken, 1 passed by" in x for x in lines):
        raise SystemExit(f"{text[-2000:]}\nblas: {target} failed")


def blas_program(compiler: list[str], units: int) -> Path:
    """Compile a program, its BLAS and the library for a target."""
    folder = OBJECTS / f"blas-{compiler[-1]}"
    folder.mkdir(parents=True, exist_ok=True)
    command = [*compiler, *OPTIONS]
    sources = [x for x in sorted(NATIVE.glob("*.cpp")) if UNITS_IN.get(x.stem, ALL_UNITS) & units]
    objects = compile_sources(command, [x for x in sources if x.stem not in STAMPED])
    stamped = [x for x in sources if x.stem in STAMPED]
    objects += compile_sources([*command, f"-DLP_BUILT={units:#x}"], stamped)
    shared = [*command, "-shared", "-nostdlib++", "-o"]
    stub = [str(folder / "libstub.so"), str(CHECKS / "blas_stub.cpp"), "-fvisibility=default"]
    run([*shared, str(folder / "libkernels.so"), *objects, "-lpthread"])
    run([*shared, *stub])
    names = ["-DBLAS_PREFIX=", "-DBLAS_END=", "-DBLAS_INT=int32_t"]
    made = folder / "program"
    linked = [stub[0], f"-Wl,-rpath,{folder}"]
    run([*compiler, "-O1", *names, str(CHECKS / "blas_program.cpp"), "-o", str(made), *linked])
    return made


def check_style() -> None:
    """Run clang-format and clang-tidy."""
    tools = Path(sys.executable).parent
    if not (tools / "clang-tidy").exists():
        print('style: pip install -e ".[native]" first')
        return
    sources = sorted([*NATIVE.glob("*.*"), *CHECKS.glob("*.*pp")])
    run([str(tools / "clang-format"), "--dry-run", "-Werror", *map(str, sources)])
    for source in sorted(NATIVE.glob("*.cpp")):
        run(
            [
                str(tools / "clang-tidy"),
                "--quiet",
                str(source),
                "--",
                "-std=c++17",
                "-fno-exceptions",
            ]
        )


#: Targets of zig, and platforms of wheels.
TARGETS = (
    "x86_64-linux-gnu.2.17 manylinux2014_x86_64",
    "aarch64-linux-gnu.2.17 manylinux2014_aarch64",
    "aarch64-macos.11.0 macosx_11_0_arm64",
    "x86_64-macos.11.0 macosx_11_0_x86_64",
    "x86_64-windows-gnu win_amd64",
)


def check_wheels() -> None:
    """Make and check the wheels of all systems; compare zig's code for this processor with the system compiler's."""
    compiler = zig()
    if compiler is None:
        print("wheels: no zig here")
        return
    python, folder = [sys.executable, "-m"], ROOT / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    os.environ["LOWPREC_BUILD"] = "require"
    for os.environ["LOWPREC_BUILD_TARGET"] in TARGETS:
        run([*python, "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)])
    del os.environ["LOWPREC_BUILD_TARGET"]
    for wheel in sorted(folder.iterdir()):
        print(f"{wheel.name}: {wheel.stat().st_size >> 10} KiB")
        if "manylinux" in wheel.name:
            report = run([*python, "auditwheel", "show", str(wheel)])
            platform_tag = re.search(r'following platform tag: "(\w+)"', " ".join(report.split()))
            if platform_tag is None or platform_tag[1].replace("_2_17", "2014") not in wheel.name:
                raise BuildError(f"auditwheel on {wheel.name}: {report}")
    run([*python, "twine", "check", "--strict", *map(str, folder.iterdir())])
    if architecture(platform.machine()) == "x86_64" and sys.platform == "linux":
        compiler += ["-target", TARGETS[0].split()[0]]
        compare(
            "zig", hashes([program("zig", compiler, OPTIONS, ["-lpthread", "-nostdlib++"])], 97)
        )


#: Instructions and registers of an instruction set in a disassembly.
INSTRUCTIONS = {
    "avx2": r"\tv(?!err|erw)[a-z]",
    "avx512": r"%zmm|%k[0-7]\b|%[xy]mm(?:1[6-9]|2\d|3[01])\b",
    "avx512bf16": r"\tv(?:dpbf16|cvtne\w*bf16)",
    "vnni": r"\tvpdp[bw]",
    "amx": r"%tmm",
    # Of a * b - c * d and a * d + b * c, which GCC's vectorizer fuses whatever -ffp-contract is; no file may have it.
    "fused": r"\tvfm(?:addsub|subadd)",
}
#: Those that a file may have, by the beginning of its name; all others may have none.
LEVELS = {
    "x86_amx": ("avx2", "avx512", "amx"),
    "x86_avx512bf16": ("avx2", "avx512", "avx512bf16"),
    "x86_avx512vnni": ("avx2", "avx512", "vnni"),
    "x86_avx512": ("avx2", "avx512"),
    "x86_avxvnni": ("avx2", "vnni"),
    "x86_avx2": ("avx2",),
}


def check_levels() -> None:
    """Search the disassembly of each object for instructions outside its level."""
    if shutil.which("objdump") is None or architecture(platform.machine()) != "x86_64":
        print("levels: no objdump here, or no x86-64")
        return
    sources, failures = sorted(NATIVE.glob("*.cpp")), []
    for source, made in zip(
        sources, compile_sources([*native_compiler(), *OPTIONS], sources), strict=True
    ):
        own = next((sets for name, sets in LEVELS.items() if source.stem.startswith(name)), ())
        command = ["objdump", "-d", "--no-show-raw-insn", made]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for section in text.split("Disassembly of section ")[1:]:
            # A function that several objects define has a section of its name, of which the linker keeps any one.
            allowed = () if section.startswith(".text._Z") else own
            for name, pattern in INSTRUCTIONS.items():
                if name not in allowed and (found := re.search(pattern, section)):
                    line = section[
                        section.rindex("\n", 0, found.start()) : section.index("\n", found.end())
                    ]
                    failures.append(
                        f"{source.name}, {section.partition(':')[0]}, {name}: {line.strip()}"
                    )
    print(
        "\n".join(
            [
                *failures,
                f"levels: {len(sources)} files, {len(failures)} kinds of instructions outside",
            ]
        )
    )
    if failures:
        raise SystemExit(1)


def main(names: list[str]) -> None:
    """Run the named checks."""
    default = ["style", "levels", "native", "fuzz", "haswell", "aarch64", "blas", "sanitized"]
    for name in names or default:
        if name in SANITIZERS:
            check_sanitized(name)
        else:
            globals()[f"check_{name}"]()
        print(f"{name}: ok", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BuildError as error:
        sys.exit(str(error))
