"""``lowprec run``: libraries are imported as ever, and the program, its threads and its children are under the mode."""

import multiprocessing
import shutil
from pathlib import Path

import pytest

import lowprec
from support.cpu_units import medium_lowers
from support.programs import GUARD, LIBRARY, TF32, posix, same, start, without_note, write

pytestmark = pytest.mark.usefixtures("empty_folder")


# -- libraries are imported as without lowprec ------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["def f():\n    raise RuntimeError('no driver')\nf()", "import missing_module", "x = ("],
    ids=["raises", "lacks", "syntax"],
)
def test_a_library_that_fails_looks_as_it_does(text):
    write(text, "tensorflow.py")
    assert same(write("import tensorflow"), under=GUARD).code == 1


def test_the_user_s_own_sitecustomize_runs():
    write("import tensorflow\nnoted = __name__, __file__", "own/sitecustomize.py")
    write(LIBRARY, "own/tensorflow.py")
    where = {"PYTHONPATH": str(Path("own").resolve())}
    script = write("import sitecustomize, sys\nprint(sitecustomize.noted, sys.path)")
    assert same(script, variables=where).out.startswith("('sitecustomize', ")
    # A library that it imports is set too.
    script = write("import tensorflow\nprint(tensorflow.switch.tf32)")
    assert start(script, under=TF32, variables=where) == (0, "True\n", "")


def test_two_copies_of_lowprec():
    """The inner run is that of another virtual environment."""
    write(LIBRARY, "tensorflow.py")
    script = write(
        "import lowprec, tensorflow\nprint(lowprec.__file__, lowprec.get_math_mode(), tensorflow.switch.tf32)"
    )
    copy = Path("other/lowprec").resolve()
    shutil.copytree(
        Path(lowprec.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__")
    )
    outer = write(f"""
        import os, subprocess, sys
        path = os.pathsep.join([{str(copy.parent)!r}, os.environ["PYTHONPATH"]])
        command = [sys.executable, "-m", "lowprec", "run", "--mode", "tf32", "--profile", {script!r}]
        sys.exit(subprocess.call(command, env={{**os.environ, "PYTHONPATH": path}}))
    """, "outer.py")  # fmt: skip
    seen = start(outer, under=("--mode", "fp32", "--profile"))
    assert seen[:2] == (0, f"{copy / '__init__.py'} tf32 True\n")
    assert seen.err.count("of the program") == 1


def test_a_finder_that_asks_all_others():
    write(LIBRARY, "tensorflow.py")
    script = write("""
        import sys

        class Finder:
            @classmethod
            def find_spec(cls, *asked):
                found = (finder.find_spec(*asked) for finder in sys.meta_path if finder is not cls)
                return next(filter(None, found), None)

        sys.meta_path.insert(1, Finder)
        import tensorflow
        print(tensorflow.switch.tf32)
    """)
    assert start(script, under=TF32) == (0, "True\n", "")


# -- the program is under the mode ----------------------------------------------------------------

LATE = """
import tensorflow, lowprec, threading
def shown():
    print(lowprec.get_math_mode(), tensorflow.switch.tf32)
shown()
thread = threading.Thread(target=shown)
thread.start()
thread.join()
"""


@pytest.mark.parametrize(
    ("under", "found", "message"),
    [
        (TF32, "tf32 True\n", ""),
        (("--mode=high",), "tf32 True\n", ""),
        (("--mode", "fp32"), "fp32 False\n", ""),
        (GUARD, "fp32 False\n", ""),
        (
            ("--mode", "bf16"),
            "bf16 its own\n",
            "does not reach tensorflow (tensorflow has no switch for bf16); it keeps its own setting\n",
        ),
    ],
    ids=str,
)
def test_the_mode_is_in_force(under, found, message):
    write(LIBRARY, "tensorflow.py")
    seen = without_note(start(write(LATE), under=under))
    assert seen == (0, 2 * found, message and f"lowprec run --mode bf16 {message}")


def test_a_library_that_the_guard_cannot_hold_is_not_imported():
    write("", "tensorflow.py")
    script = write("""
        import sys
        try:
            import tensorflow
        except ImportError as error:
            print(error.name, "tensorflow" in sys.modules)
        import tensorflow
    """)
    seen = start(script, under=GUARD)
    assert (seen.code, seen.out) == (1, "tensorflow False\n")
    message = seen.err.splitlines()[-1]
    assert message.startswith("ImportError: lowprec run --guard cannot hold tensorflow at full ")
    # With a mode, it is used as it is.
    seen = start(write("import tensorflow; print(1)"), under=TF32)
    assert (seen.code, seen.out) == (0, "1\n")
    assert seen.err.startswith("lowprec run --mode tf32 does not reach tensorflow (TensorFlow of ")


@pytest.mark.parametrize(
    ("under", "shown"),
    [
        (TF32, "lowprec run --mode tf32 does not reach tensorflow (ImportError: none here); "),
        (
            GUARD,
            "ImportError: lowprec run --guard cannot hold tensorflow at full FP32: ImportError",
        ),
    ],
    ids=["mode", "guard"],
)
def test_a_python_without_lowprec(under, shown):
    write(LIBRARY, "folder/tensorflow.py")
    # The folder of the script comes first for the program, and not for the launcher.
    write("raise ImportError('none here')", "folder/lowprec.py")
    script = write("import tensorflow\nprint(tensorflow.switch.tf32)", "folder/script.py")
    seen = start(script, under=under)
    assert shown in seen.err
    assert (seen.code, seen.out) == ((0, "its own\n") if under is TF32 else (1, ""))


CHILDREN = """
import multiprocessing, os, subprocess, sys

def shown(place):
    import lowprec, tensorflow
    print(place, lowprec.get_math_mode(), tensorflow.switch.tf32, flush=True)

if __name__ == "__main__":
    for method in multiprocessing.get_all_start_methods():
        child = multiprocessing.get_context(method).Process(target=shown, args=[method])
        child.start()
        child.join()
    code = "import script; script.shown('subprocess')"
    subprocess.run([sys.executable, "-c", code], check=True)
    os.environ["OTHER"] = "1"
    subprocess.run([sys.executable, "-c", code.replace("subprocess", "grandchild")], check=True)
"""


@pytest.mark.parametrize(
    ("under", "shown"), [(TF32, "tf32 True"), (GUARD, "fp32 False")], ids=["mode", "guard"]
)
def test_children_are_under_the_mode(under, shown):
    write(LIBRARY, "tensorflow.py")
    places = [*multiprocessing.get_all_start_methods(), "subprocess", "grandchild"]
    seen = start(write(CHILDREN), under=under, options=["-W", "ignore"])
    assert seen == (0, "".join(f"{place} {shown}\n" for place in places), "")


SETS = """
import lowprec, tensorflow
tensorflow.switch.enable_tensor_float_32_execution(True)
print(tensorflow.switch.tf32)
with lowprec.fp32_guard():
    print(tensorflow.switch.tf32)
print(tensorflow.switch.tf32)
"""


def test_a_switch_that_the_program_sets_is_kept_and_reported_under_the_guard():
    write(LIBRARY, "tensorflow.py")
    seen = start(write(SETS), under=GUARD)
    assert seen.out == "True\nFalse\nTrue\n"
    assert seen.err == (
        "lowprec run --guard: tensorflow: config.experimental.tensor_float_32_execution = True was set by the program, "
        "and is kept\n"
    )
    assert start(write(SETS), under=("--mode", "fp32")) == (0, "True\nFalse\nTrue\n", "")


# -- PyTorch and JAX ------------------------------------------------------------------------------

REAL = """
import threading
import lowprec

def shown(*words):
    if "torch" in words:
        import torch
        m, n = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0))
        exact = m.double() @ n.double()
        error = float(((m @ n).double() - exact).norm() / exact.norm())
        print(torch.get_float32_matmul_precision(), 5e-4 < error < 1e-2, error < 1e-5, flush=True)
    if "jax" in words:
        import jax
        print(jax.config.jax_default_matmul_precision, flush=True)

if __name__ == "__main__":
    import multiprocessing, sys
    thread = threading.Thread(target=shown, args=sys.argv[1:])
    thread.start()
    thread.join()
    shown(*sys.argv[1:])
    child = multiprocessing.get_context("spawn").Process(target=shown, args=sys.argv[1:])
    child.start()
    child.join()
"""


@pytest.mark.parametrize(
    ("under", "word", "is_full"),
    [(("--mode", "bf16"), "medium", False), (GUARD, "highest", True)],
    ids=["mode", "guard"],
)
@pytest.mark.sweep
def test_pytorch(under, word, is_full):
    pytest.importorskip("torch", reason="torch is not installed")
    seen = start(write(REAL), "torch", under=under)
    # Many a CPU computes in full FP32 whatever the switch says.
    low = not is_full and medium_lowers(256)
    # 2^-9 per operand for bfloat16, so about 2e-3; FP32's own 2^-24 gives 3e-7.
    assert seen == (0, 3 * f"{word} {low} {not low}\n", "")


@pytest.mark.parametrize(
    ("under", "word"),
    [pytest.param(("--mode", "bf16"), "bfloat16", marks=pytest.mark.sweep), (GUARD, "highest")],
    ids=["mode", "guard"],
)
def test_jax(under, word):
    pytest.importorskip("jax", reason="jax is not installed")
    assert start(write(REAL), "jax", under=under) == (0, 3 * f"{word}\n", "")


# -- tables at the end ----------------------------------------------------------------------------

STEP = """
import torch
layer = torch.nn.Linear(4, 2)
layer(torch.ones(3, 4)).sum().backward()
print(layer.weight.grad[0, 0].item())
"""


@pytest.mark.sweep
def test_products_of_pytorch_are_taken_and_shown():
    pytest.importorskip("torch", reason="torch is not installed")
    seen = start(write(STEP), under=("--mode", "bf16", "--intercept", "--profile"))
    assert (seen.code, seen.out) == (0, "3.0\n")
    first, *lines = seen.err.splitlines()
    assert first == "lowprec.torch.intercept('bf16'): 2 taken (1 in backward passes), 0 passed by"
    assert sum(line.split()[1:2] in (["addmm"], ["mm"]) for line in lines) == 2
    assert "2 products in" in seen.err
    # Nothing below the guard, which the caller's environment has.
    under = ("--mode", "bf16", "--intercept")
    seen = start(write(STEP), under=under, variables={"LOWPREC_FP32_GUARD": "1"})
    assert "lowprec.torch.intercept('fp32'): 2 taken" in seen.err


@pytest.mark.sweep
def test_intercepted_products_need_no_switch():
    pytest.importorskip("torch", reason="torch is not installed")
    assert "torch has no switch for nvfp4" in start(write(STEP), under=("--mode", "nvfp4")).err
    seen = start(write(STEP), under=("--mode", "nvfp4", "--intercept"))
    assert seen.err.startswith("lowprec.torch.intercept('nvfp4'): 2 taken")


def test_products_of_numpy_are_taken_and_shown():
    script = write("""
        import numpy as np
        x = np.full((4, 4), 1 + 2.0**-12)
        print((x @ x)[0, 0], np.dot(x, x)[0, 0], np.einsum("ij,jk->ik", x, x, optimize=True)[0, 0])
    """)
    seen = start(script, under=("--mode", "bf16", "--intercept"))
    assert (seen.code, seen.out) == (0, "4.0 4.0 4.0\n")
    assert "lowprec.numpy.intercept('bf16', cast=True): 3 taken" in seen.err
    assert "float64 operands were rounded once" in seen.err
    assert "NumPy's own are with --intercept" in start(script, under=("--mode", "bf16")).err


WORKERS = """
import sys, torch
from torch.utils.data import DataLoader, Dataset

class Products(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.ones(4, 4) @ torch.ones(4, 4)

if __name__ == "__main__":
    for _ in DataLoader(Products(), num_workers=2, multiprocessing_context=sys.argv[1]):
        torch.nn.Linear(4, 4)(torch.ones(2, 4))
"""


@posix
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.sweep)])
def test_products_of_workers_are_in_one_report(method):
    pytest.importorskip("torch", reason="torch is not installed")
    under = ("--mode", "Linear=fp32,*=bf16", "--intercept")
    seen = start(write(WORKERS), method, under=under)
    assert seen.code == 0
    assert "8 taken (0 in backward passes), 0 passed by, in 3 processes" in seen.err
    assert seen.err.count("lowprec.torch.intercept(") == 1
    assert [line.split()[-1] for line in seen.err.splitlines() if line.startswith("  Linear ")] == [
        "fp32"
    ]


def test_products_of_a_program_are_shown():
    script = write("""
        import atexit, numpy, lowprec
        a = numpy.ones((8, 8), numpy.float32)
        atexit.register(lowprec.matmul, a, a)
        print(lowprec.matmul(a, a)[0, 0], lowprec.get_math_mode())
    """)
    seen = start(script, under=("--profile",))
    assert seen[:2] == (0, "8.0 fp32\n")
    assert "8x8x8" in seen.err
    assert "2 products in" in seen.err
    seen = start(script, under=("--profile", *GUARD))
    assert "guard_variable" in seen.err


def test_options_without_effect_are_reported():
    seen = start(write("print(1)"), under=("--mode", "bf16", "--intercept", "--profile"))
    said = [
        "lowprec run --mode bf16: no product was affected (none was seen)\n",
        "lowprec run --profile: the program did not import lowprec\n",
    ]
    assert seen == (0, "1\n", "".join(said))


@pytest.mark.parametrize(
    ("text", "is_affected"),
    [
        ("a @ a", False),
        ("import lowprec; lowprec.get_math_mode()", False),
        ("import lowprec; lowprec.matmul(a, a)", True),
        ("import tensorflow", True),
        (
            "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import tensorflow'])",
            True,
        ),
        ("import os; os.fork()", False),  # reported once
    ],
)
def test_a_mode_that_affects_no_product_is_reported(text, is_affected):
    write(LIBRARY, "tensorflow.py")
    script = write(f"import numpy\na = numpy.ones((2, 2), numpy.float32)\n{text}")
    err = start(script, under=TF32).err
    assert err.count("no product was affected") == (not is_affected)
    assert not start(script, under=GUARD).err
