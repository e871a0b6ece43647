"""``lowprec run --against``: a program runs twice, and its layers and printed numbers are compared."""

import sys
from pathlib import Path

import pytest

from lowprec.core.printed import compare_lines
from support.programs import start, write

pytestmark = pytest.mark.usefixtures("empty_folder")

UNDER = ("--mode", "bf16", "--against", "fp32")

TRAINING = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
x = torch.randn(32, 64)
x[:, 5] /= 100
with torch.no_grad():
    model[0].weight[:, 5] *= 100
for step in range(3):
    loss = model(x).square().mean()
    model.zero_grad()
    loss.backward()
    print(f"step {step}: loss {loss.item():.8f}, {step + 1} s", flush=True)
"""


@pytest.mark.usefixtures("torch")
def test_a_training_is_compared():
    under = ("--mode", "2=bf16,*=nvfp4", "--against", "fp32")
    seen = start(write(TRAINING), under=under)
    assert seen.code == 0
    assert seen.out.count("step ") == 3
    verdict, _, table = seen.err.partition("\n{'2': 'bf16', '*': 'nvfp4'} against fp32\n")
    assert verdict.startswith("nvfp4 computed 9")
    assert "the printed numbers changed by up to " in verdict
    heading, first, *_ = table.splitlines()
    assert heading.split()[:4] == ["layer", "pass", "mode", "calls"]
    assert first.split()[:4] == ["0", "forward", "nvfp4", "3"]
    assert "printed lines with the largest changes, of 3 that changed" in seen.err
    assert "intercept(" not in seen.err


NUMPY = """
import numpy as np

x = np.full((8, 8), 1 + 2.0**-9, np.float32)
print("the sum is", (x @ x).sum())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the BLAS is intercepted on Linux")
def test_printed_numbers_of_numpy_are_compared():
    """Each factor is rounded to 1, so the sum changes by 2**-8."""
    seen = start(write(NUMPY), under=(*UNDER, "--save", "run.html"))
    assert seen.out == "the sum is 512.0\n"
    assert seen.err.startswith(
        "bf16 computed 100 % of the multiplications; the printed numbers changed by up to 0.39 % (line 1)"
    )
    assert "__main__.<module>" in seen.err
    assert '<td style="text-align: left">the sum is 512.0</td>' in Path("run.html").read_text()


def test_each_run_reads_a_file(tmp_path):
    (tmp_path / "in.txt").write_text("3\n4\n")
    script = write("import sys; print(sys.stdin.read().split(), sys.argv[1:], end='')")
    seen = start(script, "-x", stdin="3\n4\n", under=UNDER)
    assert seen.out == "['3', '4'] ['-x']"
    assert "the result did not change" in seen.err


def test_exit_codes_are_the_program_s():
    seen = start(write("import sys; sys.exit(3)"), under=UNDER)
    assert (seen.code, seen.out) == (3, "")
    assert seen.err == "lowprec run --against: the program in fp32 ended with exit code 3\n"
    script = write("import os; print(1); os._exit(5 * (os.environ['LOWPREC_MATH_MODE'] == 'bf16'))")
    seen = start(script, under=UNDER)
    assert (seen.code, seen.out) == (5, "1\n")
    assert "the program in bf16 ended with exit code 5" in seen.err
    assert "multiplied nothing that lowprec sees" in seen.err


def test_processes_of_the_program_do_not_record():
    script = write("""
        import os, subprocess, sys
        assert not {"LOWPREC_RUN_RECORD"} & set(os.environ)
        print(subprocess.run([sys.executable, "-c", "import numpy"]).returncode)
    """)
    seen = start(script, under=UNDER)
    assert (seen.code, seen.out) == (0, "0\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--guard", "--against", "fp32"), "run: --against goes with --mode"),
        (("--mode", "bf16", "--save", "x.html"), "run: --save goes with --against"),
        ((*UNDER, "--save", "missing/x.html"), "cannot write missing/x.html: the folder"),
        (
            ("--mode", "bf16", "--against", "fp33"),
            "argument --against: mode 'fp33' is not a math mode",
        ),
        (("--mode", "bf16", "--against", "fp32", "--", "ls"), "--against compares Python programs"),
    ],
)
def test_mistakes_are_reported(refused, words, message):
    assert message in refused("run", *words, *([] if "--" in words else [write("1")]))


def test_numbers_are_compared_line_by_line():
    lines, change, parting = compare_lines(
        ["step 100 loss 2.5", "layer2 [1e-3, -4.0]", "took 3.5 s, 7 it/s", "norm nan", "x 1"],
        ["step 100 loss 2.0", "layer2 [1e-3, -8.0]", "took 4.5 s, 9 it/s", "norm 2.0", "x 1"],
    )
    assert [(line.number, line.change) for line in lines] == [
        (4, float("inf")),
        (2, 0.5),
        (1, 0.25),
    ]
    assert change == float("inf")
    assert not parting


def test_other_words_end_the_comparison():
    lines, change, parting = compare_lines(["a 1", "b 2", "c 3"], ["a 1", "d 2", "c 4"])
    assert parting == "The printed lines part at line 2: 'b 2', in the reference 'd 2'."
    assert (lines, change) == ((), 0.0)
    *_, parting = compare_lines(["a", "b"], ["a"])
    assert parting == "The runs printed 2 and 1 lines."
    assert compare_lines(["words"], ["words"]) == ((), None, "")
