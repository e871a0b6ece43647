"""``lowprec autotune``: without a GPU, with one that cannot be used, and what it shows of measurements."""

import importlib
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from lowprec.backends import AlgorithmTiming
from lowprec.formats import DType
from lowprec.tuning import AutotuneResult

#: The module whose names the tests replace.
module = importlib.import_module("lowprec.cli.commands.autotune")

WORDS = ("autotune", "--shapes", "32x16", "16x8")
TIMED = (
    AlgorithmTiming(2, 0.5, "id 66"),
    AlgorithmTiming(1, 0.75, "id 7"),
    AlgorithmTiming(0, 1.0, "id 21"),
)


def _gpu(**facts):
    found = {"used": False, "driver": None, "reason": "no NVIDIA driver was found", **facts}
    return lambda: {"gpu": found}


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU for the command: host arrays, and given measurements."""
    calls = []

    def tune(a, b, **options):
        calls.append((a, b, options))
        return AutotuneResult("a product", "cuda:0: NVIDIA Something", TIMED)

    monkeypatch.setattr(module, "info", _gpu(used=True))
    make = lambda shape, element, rng: module.operand(rng, shape, element)  # noqa: E731
    monkeypatch.setattr(module, "_maker", lambda: make)
    monkeypatch.setattr(module.tuning, "autotune", tune)
    return calls


def test_without_a_gpu_there_is_nothing_to_tune(command, monkeypatch):
    monkeypatch.setattr(module, "info", _gpu())
    done = command(*WORDS)
    assert done == (0, "nothing to tune: no NVIDIA driver was found\n", "")
    done = command(*WORDS, "--json")
    found = {"device": None, "reason": "no NVIDIA driver was found", "results": []}
    assert (done.code, json.loads(done.out), done.err) == (0, found, "")


def test_a_gpu_that_cannot_be_used_is_an_error(refused, monkeypatch):
    reason = "arrays on a GPU need nvmath-python"
    monkeypatch.setattr(module, "info", _gpu(driver="NVRM version 580", reason=reason))
    assert reason in refused(*WORDS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--shapes", "32x16"), "pairs of shapes, got 1"),
        (("--shapes", "32x16", "17x8"), "(32, 16) and (17, 8)"),
        (("--shapes", "32x16", "16x8", "8x8"), "pairs of shapes, got 3"),
        (("--shapes", "32x-1", "16x8"), "is not a shape"),
        ((*WORDS[1:], "--candidates", "0"), "'0' is not a whole number of at least 1"),
        ((*WORDS[1:], "--candidates", "1000"), "1000 is more than 256"),
        ((*WORDS[1:], "--mode", "tf23"), "'tf23' is not a math mode"),
    ],
)
def test_mistakes_are_reported_on_any_machine(refused, words, said):
    assert said in refused("autotune", *words)


def test_the_first_library_that_sees_a_gpu_makes_the_arrays(refused, monkeypatch):
    library = lambda sees, **functions: SimpleNamespace(  # noqa: E731
        cuda=SimpleNamespace(is_available=lambda: sees), **functions
    )
    monkeypatch.setitem(sys.modules, "torch", library(False))
    monkeypatch.setitem(
        sys.modules, "cupy", library(True, asarray=lambda host: ("on the GPU", host))
    )
    place, made = module._maker()((8, 4), DType.FLOAT32, np.random.default_rng(0))
    assert (place, made.shape, made.dtype) == ("on the GPU", (8, 4), np.float32)
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(module, "info", _gpu(used=True))
    assert "PyTorch or CuPy: torch sees no GPU, cupy is not installed" in refused(*WORDS)


@pytest.mark.parametrize("element", [d for d in DType if d is not DType.INT32])
def test_torch_makes_every_element_type(torch, monkeypatch, element):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    to = torch.Tensor.to
    # "cuda" means host memory here.
    monkeypatch.setattr(torch.Tensor, "to", lambda x, where: x if where == "cuda" else to(x, where))
    made = module._maker()((8, 4), element, np.random.default_rng(0))
    assert (tuple(made.shape), str(made.dtype)) == ((8, 4), f"torch.{element}")
    assert bool((made.to(torch.complex64) != 0).any())


def test_the_table_shows_first_choice_and_taken(command, gpu, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    done = command(*WORDS, "8x4x4", "8x4x4", "--mode", "tf32", "--candidates", "9")
    assert (done.code, done.err) == (0, "")
    title, _, first, second = done.out.splitlines()
    assert title == "products on cuda:0: NVIDIA Something"
    for line, words in ((first, "32x16 @ 16x8"), (second, "8x4x4 @ 8x4x4")):
        assert words in line
        assert line.split("float32")[1].split() == [
            "tf32", "3", "1.00", "ms", "500", "us", "2.00x", "choice", "3:", "id", "66",
        ]  # fmt: skip
    a, b, options = gpu[0]
    assert (a.shape, b.shape, a.dtype) == ((32, 16), (16, 8), np.float32)
    assert (str(options["math_mode"]), options["candidates"]) == ("tf32", 9)


def test_json_holds_all_that_was_measured(command, gpu):
    found = json.loads(command(*WORDS, "--dtype", "bfloat16", "--json").out)
    assert found["device"] == "cuda:0: NVIDIA Something"
    (result,) = found["results"]
    assert {k: result[k] for k in ("a", "b", "dtype", "mode", "speedup")} == {
        "a": [32, 16], "b": [16, 8], "dtype": "bfloat16", "mode": None, "speedup": 2.0,
    }  # fmt: skip
    assert [x["rank"] for x in result["timed"]] == [2, 1, 0]
    assert result["timed"][0] == {"rank": 2, "median_ms": 0.5, "algorithm": "id 66"}
