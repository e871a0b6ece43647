"""``lowprec run --intercept -- COMMAND``: the BLAS calls of programs that are not Python.

The programs are compiled here, for the OpenBLAS of NumPy (64-bit integers) and of SciPy (32-bit integers).
"""

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import lowprec
from support.native import compiled, openblas
from support.programs import start, write

SOURCE = Path(__file__).parents[1] / "native" / "blas_program.cpp"
pytestmark = pytest.mark.usefixtures("empty_folder")

#: Unit roundoff of the operands of modes; of `bf16x3`, that of two parts (docs/recovery.md).
UNITS = {"fp32": 0.0, "bf16": 2.0**-8, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16x3": 2.0**-15}

#: A library of the name of a solver's, and one of another name, whose functions multiply.
LIBRARY = """
#include <stdint.h>
extern "C" void scipy_cblas_sgemm64_(int, int, int, int64_t, int64_t, int64_t, float, const float*, int64_t,
                                     const float*, int64_t, float, float*, int64_t);
float FUNCTION(float x) {
    float one = 1, found = 0;
    scipy_cblas_sgemm64_(101, 111, 111, 1, 1, 1, 1, &x, 1, &one, 1, 0, &found, 1);
    return found;
}
"""
CALLER = """
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>
float of_solver(float);
float of_other(float);
int main(void) {
    const float x = 1 + 1.0f / 1024;
    printf("%d %d\\n", of_solver(x) == x, of_other(x) == x);
    fflush(stdout);
    if (!fork()) {
        of_other(x);
        of_other(x);
        return 0;
    }
    wait(0);
    return 3;
}
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Compile the program for a library at its first use."""
    made = {}

    def program(library):
        if library not in made:
            path = openblas(library)
            names = {"numpy": ("64_", "int64_t", ["-DBLAS_64"]), "scipy": ("", "int32_t", [])}
            end, integer, more = names[library]
            defined = ["-DBLAS_PREFIX=scipy_", f"-DBLAS_END={end}", f"-DBLAS_INT={integer}", *more]
            made[library] = compiled(
                tmp_path_factory.mktemp(library),
                SOURCE,
                *defined,
                str(path),
                f"-Wl,-rpath,{path.parent}",
            )
        return str(made[library])

    return program


def launched(mode, *words, **how):
    return start("--", *words, under=("--mode", mode, "--intercept"), **how)


@pytest.mark.parametrize("library", ["numpy", "scipy"])
@pytest.mark.parametrize("mode", UNITS)
def test_every_routine_is_computed_in_the_mode(programs, library, mode):
    seen = launched(mode, programs(library), str(UNITS[mode]))
    assert seen.code == 0, seen.out
    assert seen.out.startswith("dot 1\n"), "vectors are not rounded"
    assert ": 1950 taken, 1 passed by\n" in seen.err
    assert "vectors are not rounded" in seen.err
    assert re.search(rf"^  [sdcz]\w+ .* {mode}$", seen.err, re.MULTILINE)


def test_the_bound_of_the_program_notices_a_mode(programs):
    assert launched("bf16", programs("numpy"), str(2.0**-11)).code == 1


def test_without_lowprec_the_program_is_exact(programs):
    done = subprocess.run([programs("numpy"), "0"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_illegal_arguments_are_reported_by_the_blas(tmp_path):
    path = openblas("numpy")
    source = SOURCE.with_name("blas_illegal.cpp")
    program = str(compiled(tmp_path, source, str(path), f"-Wl,-rpath,{path.parent}"))
    own = subprocess.run([program], capture_output=True, text=True, check=True)
    seen = launched("bf16", program)
    assert seen.out == own.stdout
    errors, _, report = seen.err.partition("lowprec: products of ")
    assert errors == own.stderr
    assert (own.stdout + own.stderr).count("On entry to") > 100
    assert ": 29 taken, 6 passed by\n" in report


def test_a_solver_keeps_its_precision_and_a_child_has_its_own_report(tmp_path):
    path = openblas("numpy")
    Path("library.cpp").write_text(LIBRARY)
    Path("caller.cpp").write_text(CALLER)
    options = ["-shared", "-fPIC", str(path), f"-Wl,-rpath,{path.parent}"]
    made = [
        compiled(tmp_path, tmp_path / "library.cpp", f"-DFUNCTION=of_{name}", *options, name=file)
        for name, file in (("solver", "liblapack_like.so"), ("other", "libother.so"))
    ]
    program = compiled(tmp_path, tmp_path / "caller.cpp", *map(str, made), f"-Wl,-rpath,{tmp_path}")
    seen = launched("bf16", str(program))
    assert (seen.code, seen.out) == (3, "1 0\n")
    first, second = re.findall(r": (\d+) taken, (\d+) passed by", seen.err)
    assert (first, second) == (("2", "0"), ("1", "1"))  # the child ends first
    assert re.search(
        r"sgemm +\(any shape\) +float32 +1 +50.0%  a solver or a factorisation", seen.err
    )


def test_a_mode_of_another_build_is_refused(programs):
    variables = {"LOWPREC_BLAS": "00", "LD_PRELOAD": preloaded_library()}
    done = subprocess.run(
        [programs("numpy"), "0"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    reason = "none of fp32, tf32, bf16 and fp16, and not the text of this version"
    assert (
        done.stderr == f"lowprec: LOWPREC_BLAS is {reason}; the products of program are its own\n"
    )


@pytest.mark.parametrize("mode", ["fp32", "tf32", "bf16", "fp16"])
def test_the_library_is_preloaded_without_the_command(programs, mode):
    variables = {"LOWPREC_BLAS": mode, "LD_PRELOAD": preloaded_library()}
    done = subprocess.run(
        [programs("numpy"), str(UNITS[mode])],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert ": 1950 taken, 1 passed by\n" in done.stderr
    assert re.search(rf"^  [sdcz]\w+ .* {mode}$", done.stderr, re.MULTILINE)


def preloaded_library():
    from lowprec.core import blas
    from lowprec.core.rules import parse_rules

    return blas.preloaded(parse_rules("fp32"))[0]


def test_a_mode_without_a_kernel_is_named(programs):
    seen = launched("fp64", programs("numpy"), "0")
    assert seen.code == 0
    reason = "the BLAS calls of a program are not taken in fp64, which has no compiled kernel"
    assert seen.err == f"lowprec run --intercept: {reason}\n"


@pytest.mark.parametrize(
    ("loader", "bits", "reason"),
    [
        ("", 2, "it is linked statically"),
        ("/lib/ld-other.so.1", 2, r"its loader is ld-other\.so\.1, that of this Python ld-\S+"),
        ("", 1, r"its loader is one of 32 bits, that of this Python ld-\S+"),
    ],
    ids=["static", "another C library", "32 bits"],
)
def test_a_program_that_cannot_load_the_library_starts_without_it(loader, bits, reason):
    """The file has the headers of ELF alone, so the system refuses it afterwards."""
    header = struct.pack("<4sB27xQ14xHH6x", b"\x7fELF", bits, 64, 56, bool(loader))
    interpreter = struct.pack("<I4xQ16xQ16x", 3, 64 + 56, len(loader) + 1)
    Path("program").write_bytes(header + interpreter + loader.encode() + b"\0")
    Path("program").chmod(0o755)
    seen = launched("bf16", "./program")
    first, second, *_ = seen.err.splitlines()
    assert re.fullmatch(
        rf"lowprec run --intercept: the BLAS calls of \./program are not taken: {reason}", first
    )
    assert second.startswith("lowprec: run: cannot start ./program: ")


def test_a_python_program_is_numpy_s():
    """Its products are counted once, by ``lowprec.numpy``."""
    script = write(
        "import numpy as np\nx = np.full((2, 2), 1 + 2.0**-9, np.float32)\nprint((x @ x)[0, 0])"
    )
    seen = launched("bf16", sys.executable, script)
    assert seen.out == "2.0\n"
    assert seen.err.count("taken (") == 1
    assert "lowprec: products of" not in seen.err


def test_a_program_without_products_reports_none():
    seen = launched("bf16", "sort", "absent")
    assert seen.code == 2
    report = r"lowprec: products of sort \(process \d+\): 0 taken, 0 passed by\n"
    assert re.fullmatch(f"sort: cannot read: absent: .*\n{report}", seen.err)


def test_a_command_without_two_dashes_is_refused_with_the_remedy(refused):
    text = refused("run", "--mode", "bf16", "sort", "x")
    assert (
        text
        == "lowprec: cannot read sort: No such file or directory; put -- before a command that is no Python file\n"
    )


def test_a_python_file_after_two_dashes_is_a_script():
    script = write("#!/bin/false\nimport sys\nprint(sys.argv)")
    Path(script).chmod(0o755)
    assert (
        start("--", f"./{script}", "-x", under=("--mode", "bf16")).out == "['./script.py', '-x']\n"
    )


#: Reads m, n and k, alpha, a (row by row) and b (column by column) and writes their product, row by row.
PRODUCT = """
#include <stdint.h>
#include <stdio.h>
#include <vector>
extern "C" void scipy_cblas_sgemm64_(int, int, int, int64_t, int64_t, int64_t, float, const float*, int64_t,
                                     const float*, int64_t, float, float*, int64_t);
int main(int, char** words) {
    FILE* file = fopen(words[1], "rb");
    int64_t size[3];
    float alpha;
    if (fread(size, 8, 3, file) != 3 || fread(&alpha, 4, 1, file) != 1) return 1;
    const int64_t m = size[0], n = size[1], k = size[2];
    std::vector<float> a(m * k), b(k * n), c(m * n);
    if (fread(a.data(), 4, m * k, file) + fread(b.data(), 4, k * n, file) != (size_t)((m + n) * k)) return 1;
    scipy_cblas_sgemm64_(101, 111, 112, m, n, k, alpha, a.data(), k, b.data(), k, 0, c.data(), n);
    file = fopen(words[2], "wb");
    fwrite(c.data(), 4, m * n, file);
    return fclose(file);
}
"""


@pytest.mark.parametrize(
    "mode", ["fp8", "fp8_rows", "fp8_blocks", "mxfp8", "mxfp4", "nvfp4", "int8"]
)
@pytest.mark.parametrize("scale", [1.0, 5e37, 1e-38], ids=str)
def test_a_mode_that_quantises_has_the_bits_of_matmul(product_program, rng, mode, scale):
    m, n, k = 37, 221, 300
    a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in ((m, k), (n, k)))
    a[3] *= 0
    a *= np.float32(scale)
    b *= np.float32(scale)
    alpha = np.float32(1.5)
    parts = (np.array([m, n, k], np.int64), alpha, a, b)
    Path("operands").write_bytes(b"".join(x.tobytes() for x in parts))
    seen = launched(mode, product_program, "operands", "result")
    assert seen.code == 0
    assert ": 1 taken, 0 passed by\n" in seen.err
    found = np.fromfile("result", np.float32).reshape(m, n)
    expected = lowprec.matmul(a, b.T, alpha=float(alpha), math_mode=mode)
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.fixture(scope="module")
def product_program(tmp_path_factory):
    folder, path = tmp_path_factory.mktemp("product"), openblas("numpy")
    source = folder / "product.cpp"
    source.write_text(PRODUCT)
    return str(compiled(folder, source, str(path), f"-Wl,-rpath,{path.parent}"))


def test_float64_is_rounded_once(tmp_path):
    """Half a unit of bfloat16 and a bit that float32 lacks: rounding to float32 first gives a tie, and 1."""
    source = tmp_path / "once.cpp"
    source.write_text("""
        #include <stdint.h>
        #include <stdio.h>
        extern "C" void scipy_cblas_dgemm64_(int, int, int, int64_t, int64_t, int64_t, double, const double*, int64_t,
                                             const double*, int64_t, double, double*, int64_t);
        int main() {
            const double x = 1 + 1.0 / 256 + 1.0 / (1ll << 40), one = 1;
            double found;
            scipy_cblas_dgemm64_(101, 111, 111, 1, 1, 1, 1, &x, 1, &one, 1, 0, &found, 1);
            printf("%.17g", found);
        }
    """)
    path = openblas("numpy")
    program = compiled(tmp_path, source, str(path), f"-Wl,-rpath,{path.parent}")
    assert float(launched("bf16", str(program)).out) == 1 + 2.0**-7
    assert float(launched("fp32", str(program)).out) == float(np.float32(1 + 2.0**-8 + 2.0**-40))
