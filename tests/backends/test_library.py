"""The compiled library: its declarations for ctypes, the checks at loading, and the build."""

import ctypes
import importlib.util
import re
import runpy
import stat
import sys
import types
from fnmatch import fnmatch
from pathlib import Path

import lowprec_command
import pytest

from lowprec.backends.cpu import library
from lowprec.errors import BackendError
from lowprec.planning.tensor_cores import Accumulation
from support.programs import posix, run_python

ROOT = Path(library.__file__).parents[3]
NATIVE = Path(library.__file__).with_name("native")

needs_sources = pytest.mark.skipif(not NATIVE.is_dir(), reason="the package is not in a checkout")
needs_library = pytest.mark.skipif(library.library() is None, reason="lowprec has no kernels")

_C_TYPES = {
    "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64, "float": ctypes.c_float,
    "double": ctypes.c_double, "lp_matrix": library.Matrix, "lp_scheme": library.Scheme,
    "lp_quantizer": library.Quantizer,
}  # fmt: skip


def header():
    return re.sub(r"//.*", "", (NATIVE / "lowprec.h").read_text(encoding="utf-8"))


def declared_fields(name):
    """Return the fields of a struct of the header, by the ctypes of their types."""
    found = re.search(rf"typedef struct {{([^}}]*)}} {name};", header())
    assert found, name
    fields = []
    for line in filter(str.strip, found[1].split(";")):
        base, names = re.fullmatch(r"\s*(?:const )?(\w+)(.*)", line, re.DOTALL).groups()
        for each in names.split(","):
            stars, field, length = re.fullmatch(r"\s*(\*?)\s*(\w+)(?:\[(\d+)\])?\s*", each).groups()
            is_pointer = stars or names.lstrip().startswith("*")
            ctype = ctypes.c_void_p if is_pointer else _C_TYPES[base]
            fields.append((field, ctype * int(length) if length else ctype))
    return fields


@needs_sources
@pytest.mark.parametrize("name", ["Matrix", "Scheme", "Product", "Quantizer", "Lines"])
def test_structures_are_those_of_the_header(name):
    c_name = "lp_" + re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower()
    assert list(getattr(library, name)._fields_) == declared_fields(c_name)


@needs_sources
def test_fields_of_a_tensor_core_are_those_of_the_header():
    fields = [(name, ctypes.c_int32) for name in Accumulation._fields[1:7]]
    assert fields == declared_fields("lp_tensor_core_model")


@needs_sources
def test_functions_and_numbers_are_those_of_the_header():
    functions = set(re.findall(r"LP_API [\w* ]+?lp_(\w+)\(", header()))
    # Those of BLAS calls and of observations are found where they are used.
    of_others = re.compile("blas_|site_|free_observed|jax_observe")
    assert {name for name in functions if not of_others.match(name)} == {*library._SIGNATURES}
    enums = {
        name: [x.partition("=")[0].strip() for x in body.split(",") if x.strip()]
        for name, body in re.findall(r"enum (\w+) {([^}]*)}", header())
    }
    assert enums["lp_unit"] == [*(f"LP_{name.upper()}" for name in library.UNITS), "LP_UNITS"]
    types = {number: name for name, number in {**library.TYPES, **library.BLOCK_TYPES}.items()}
    of_packing = {"LP_CODES_BF16", "LP_CODES_F16", "LP_TYPES"}  # no caller passes these
    assert len(types) == len([name for name in enums["lp_type"] if name not in of_packing])
    assert list(types) == list(range(len(types)))


@needs_library
def test_sources_that_have_changed_are_an_error(monkeypatch):
    monkeypatch.setattr(library, "_sources_hash", lambda: 1)
    with pytest.raises(BackendError, match=r"run `python hatch_build\.py`"):
        library._loaded.__wrapped__()


@needs_library
def test_a_format_without_a_scale_of_all_is_refused():
    quantizer = library.Quantizer(
        batches=1,
        vectors=1,
        k=16,
        vector=16,
        inner=1,
        to_vector=16,
        to_inner=1,
        block_vectors=1,
        block_k=16,
        elements=3,
    )
    x, to, scale = (ctypes.c_float * 16)(1), (ctypes.c_float * 16)(), ctypes.c_float()
    at = [ctypes.addressof(y) for y in (quantizer, x, to, scale, scale)]
    assert library.functions().quantize(*at, 1) == library.UNSUPPORTED


@needs_library
def test_own_threads_can_be_chosen_while_products_run_on_openmp():
    """A product may have read the first function before the choice, and calls the second one after it."""
    code = """
        import ctypes
        from lowprec.backends.cpu import library
        calls = []
        none = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: calls.append("in_parallel") or 1)
        def parallel(work, argument, threads, flags):
            raise AssertionError("inside a parallel region")
        first = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(parallel)
        functions, address = library.functions(), lambda f: ctypes.cast(f, ctypes.c_void_p).value
        functions.use_openmp(address(first), address(none))
        functions.use_openmp(None, None)
        functions.use_openmp(address(first), None)  # as the product sees it
        work = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(lambda at, thread: calls.append(thread))
        functions.run(work, None, 2)
        print(calls)
    """
    assert run_python(code) == "['in_parallel', 0]"


def test_reasons_for_a_missing_library(monkeypatch, tmp_path):
    path = tmp_path / "_kernels.so"
    monkeypatch.setattr(library, "_PATH", str(path))
    assert library._loaded.__wrapped__()[1] == "built without kernels (run `python hatch_build.py`)"
    with monkeypatch.context() as packed:
        packed.setattr(library.sys, "frozen", True, raising=False)
        assert library._loaded.__wrapped__()[1].endswith(
            "packed without _kernels.so: add the files of lowprec to it)"
        )
    with monkeypatch.context() as zipped:
        zipped.setattr(library, "_PATH", str(tmp_path / "program.pyz" / "lowprec" / "_kernels.so"))
        assert library._loaded.__wrapped__()[1].endswith(
            "(no library can be loaded from an archive: install lowprec instead)"
        )
    path.with_suffix(".txt").write_text("c++: no such file\n", encoding="utf-8")
    assert library._loaded.__wrapped__()[1] == "built without kernels (c++: no such file)"
    path.write_bytes(b"not a library")
    assert library._loaded.__wrapped__()[1].startswith("the kernels cannot be loaded (")


@needs_library
@posix
def test_a_lack_of_file_descriptors_is_an_error_of_one_product():
    code = """
        import os, resource
        import numpy as np
        import lowprec
        from lowprec.backends.cpu import library

        a, held = np.ones((64, 64), np.float32), []
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        try:
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        try:
            lowprec.matmul(a, a, math_mode="bf16")
        except lowprec.BackendError as error:
            print("Too many open files" in str(error))
        for file in held:
            os.close(file)
        lowprec.matmul(a, a, math_mode="bf16")
        print(library.unavailable_reason())
    """
    assert run_python(code).split() == ["True", "None"]


def test_the_hook_of_pyinstaller_collects_what_the_package_reads(monkeypatch):
    (folder,) = map(Path, lowprec_command.hook_directories())
    asked = {}
    hooks = types.ModuleType("PyInstaller.utils.hooks")
    for kind in ("data_files", "dynamic_libs", "submodules"):
        setattr(
            hooks,
            f"collect_{kind}",
            lambda package, kind=kind, **given: asked.update({kind: (package, given)}),
        )
    monkeypatch.setitem(sys.modules, "PyInstaller", types.ModuleType("PyInstaller"))
    monkeypatch.setitem(sys.modules, "PyInstaller.utils", types.ModuleType("PyInstaller.utils"))
    monkeypatch.setitem(sys.modules, "PyInstaller.utils.hooks", hooks)
    runpy.run_path(str(folder / "hook-lowprec.py"))
    assert {package for package, _ in asked.values()} == {"lowprec"}
    (pattern,) = asked["dynamic_libs"][1]["search_patterns"]
    names = ["_kernels.so", "_kernels.dylib", "_kernels.dll", "_kernels.txt"]
    assert [fnmatch(name, pattern) for name in names] == [True, True, True, False]
    package = folder.parent
    found = {
        x.name for pattern in asked["data_files"][1]["includes"] for x in package.glob(pattern)
    }
    assert found - {"_kernels.txt"} == {
        x.name for x in (package / "backends" / "cuda" / "kernels").iterdir()
    }


def test_an_exception_of_a_signal_handler_is_no_reason(monkeypatch):
    def interrupted(path):
        raise TimeoutError("of a handler")

    monkeypatch.setattr(library, "_PATH", __file__)
    monkeypatch.setattr(library.ctypes, "CDLL", interrupted)
    with pytest.raises(TimeoutError, match="of a handler"):
        library._loaded.__wrapped__()


@pytest.fixture
def builder(monkeypatch, tmp_path):
    """`hatch_build.py` with two source files in a temporary folder."""
    if not (ROOT / "hatch_build.py").is_file():
        pytest.skip("the package is not in a checkout")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    native = tmp_path / "native"
    native.mkdir()
    (native / "cpu.cpp").write_text(
        "extern int other();\nint number() { return other(); }\n", encoding="utf-8"
    )
    (native / "more.cpp").write_text("int more() { return 1; }\n", encoding="utf-8")
    monkeypatch.setattr(module, "NATIVE", native)
    monkeypatch.setattr(module, "OBJECTS", tmp_path / "objects")
    for name in ("LOWPREC_BUILD", "LOWPREC_BUILD_TARGET", "CXX"):
        monkeypatch.delenv(name, raising=False)
    return module


def needs_compiler(builder):
    if not (builder.is_supported() and builder.system_compiler()):
        pytest.skip("this system has no C++ compiler")


def initialize(builder):
    """Run the hook for a wheel; return the data of the build and the warnings."""
    warnings = []
    hook = types.SimpleNamespace(app=types.SimpleNamespace(display_warning=warnings.append))
    data = {"force_include": {}}
    builder.CustomBuildHook.initialize(hook, "standard", data)
    return data, warnings


def test_a_library_is_compiled_once_per_sources(builder):
    needs_compiler(builder)
    (builder.NATIVE / "more.cpp").write_text(
        '__attribute__((used)) static const char s[] = "lowprec 0x0"; int other() { return 1; }\n',
        encoding="utf-8",
    )
    cpu = (
        "#define TEXT_OF(x) #x\n#define TEXT(x) TEXT_OF(x)\n"
        '__attribute__((used)) static const char stamp[] = "lowprec " TEXT(LP_VERSION) " units " TEXT(LP_BUILT);\n'
    )
    (builder.NATIVE / "cpu.cpp").write_text(cpu, encoding="utf-8")
    made, tag = builder.build()
    before = made.stat().st_mtime_ns
    assert builder.build() == (made, tag)
    assert made.stat().st_mtime_ns == before
    (builder.NATIVE / "more.cpp").write_text("int other() { return 2; }\n", encoding="utf-8")
    builder.build()
    assert made.stat().st_mtime_ns != before
    data, warnings = initialize(builder)
    assert data["tag"] == f"py3-none-{tag}"
    assert data["force_include"] == {str(made): f"lowprec/backends/cpu/{made.name}"}
    assert not warnings


@posix
def test_a_library_for_this_processor_lacks_the_other_units(builder):
    needs_compiler(builder)
    cpu = 'extern "C" __attribute__((visibility("default"))) long long lp_units() { return 3; }\n'
    (builder.NATIVE / "cpu.cpp").write_text(cpu, encoding="utf-8")
    (builder.NATIVE / "api.cpp").write_text(
        "static_assert(LP_BUILT == 0x703 || LP_BUILT == 0x7ff);\n", encoding="utf-8"
    )
    (builder.NATIVE / "x86_amx.cpp").write_text("#error of AMX\n", encoding="utf-8")
    assert builder.build(for_this_cpu=True)[0].is_file()
    with pytest.raises(builder.BuildError, match="of AMX"):
        builder.build()


def test_a_missing_function_is_an_error_of_the_build(builder):
    needs_compiler(builder)
    with pytest.raises(builder.BuildError, match="other"):
        builder.build()


@posix
def test_a_compiler_that_fails_gives_a_pure_wheel(builder, monkeypatch, tmp_path):
    if not builder.is_supported():
        pytest.skip("there are no kernels for this machine")
    compiler = tmp_path / "broken"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = -dumpmachine ] && uname -m && exit\necho "a.cpp:1: error: no" >&2\nexit 1\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(compiler))
    data, (warning,) = initialize(builder)
    assert re.fullmatch(r"lowprec is built without kernels, .*: a\.cpp:1: error: no", warning)
    assert list(data["force_include"].values()) == ["lowprec/backends/cpu/_kernels.txt"]
    assert "tag" not in data
    monkeypatch.setenv("LOWPREC_BUILD", "require")
    with pytest.raises(builder.BuildError, match=r"a\.cpp:1: error: no"):
        initialize(builder)


def test_no_compiler_at_all_is_the_reason(builder, monkeypatch):
    if not builder.is_supported():
        pytest.skip("there are no kernels for this machine")
    monkeypatch.setattr(builder.shutil, "which", lambda _: None)
    monkeypatch.setattr(builder.importlib.util, "find_spec", lambda _: None)
    assert re.search(
        "no C\\+\\+ compiler: install one, or zig's: pip install 'ziglang",
        initialize(builder)[1][0],
    )
    monkeypatch.setenv("LOWPREC_BUILD_TARGET", "aarch64-linux-gnu.2.17 manylinux2014_aarch64")
    assert "needs zig's: pip install 'ziglang" in initialize(builder)[1][0]


@posix
def test_an_older_compiler_is_passed_over(builder, monkeypatch, tmp_path):
    """As GCC 11: it has no `__builtin_shufflevector`."""
    needs_compiler(builder)
    real = (
        builder.shutil.which("c++")
        or builder.shutil.which("g++")
        or builder.shutil.which("clang++")
    )
    for name, options in (
        ("c++", "-D__builtin_shufflevector=none"),
        ("g++", "-std=c++17"),
        ("clang++", "-Dfour=none"),
    ):
        compiler = tmp_path / name
        compiler.write_text(f'#!/bin/sh\nexec "{real}" {options} "$@"\n')
        compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=builder.os.pathsep)
    assert builder.system_compiler() == ["g++"]
    (tmp_path / "g++").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "clang++").write_text("#!/bin/sh\nexit 1\n")
    assert builder.system_compiler() is None
    assert builder.CustomBuildHook.dependencies(None) == [builder.ZIG]


def test_no_library_on_request_and_on_other_processors(builder, monkeypatch):
    monkeypatch.setattr(builder.platform, "machine", lambda: "riscv64")
    assert initialize(builder)[1][0].endswith(
        f": there are none for {builder.sys.platform} on riscv64"
    )
    monkeypatch.setenv("LOWPREC_BUILD", "none")
    assert initialize(builder)[1][0].endswith("LOWPREC_BUILD=none")
