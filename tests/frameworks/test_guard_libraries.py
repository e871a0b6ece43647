"""The guard over PyTorch and JAX: real switches, and real errors where this machine can show them."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from frameworks.torch_switches import ALL, LEAVES, Switches
from lowprec import LowprecWarning, MathMode, fp32_guard, info, math_mode
from lowprec.policy.controllers import controllers
from support.cpu_units import imitated_units, medium_lowers

# -- PyTorch: the switches come back --------------------------------------------------------------


def old(word: str) -> Callable[[Switches], None]:
    return lambda t: t.torch.set_float32_matmul_precision(word)


def cudnn(allow: bool) -> Callable[[Switches], None]:
    return lambda t: setattr(t.torch.backends.cudnn, "allow_tf32", allow)


def cublas(allow: bool) -> Callable[[Switches], None]:
    return lambda t: setattr(t.torch.backends.cuda.matmul, "allow_tf32", allow)


def new(backend: str, operation: str, value: str) -> Callable[[Switches], None]:
    return lambda t: t.put(backend, operation, value)


#: Every way to set a switch, old and new.
STEPS: dict[str, Callable[[Switches], None]] = {
    **{f"old {word}": old(word) for word in ("highest", "high", "medium")},
    "cudnn off": cudnn(False),
    "cudnn on": cudnn(True),
    "cublas on": cublas(True),
    "cublas off": cublas(False),
    **{f"{b}.{o} {v}": new(b, o, v) for b, o in [*LEAVES, *ALL] for v in ("ieee", "tf32", "none")},
    **{f"{b}.{o} bf16": new(b, o, "bf16") for b, o in [*LEAVES[3:], ALL[0], ALL[2]]},
}
# Steps that show whether a switch still follows another.
LATER = ["generic.all tf32", "generic.all ieee", "cuda.all tf32", "mkldnn.all bf16", "old medium"]


def history(switches: Switches, steps: tuple[str, ...], *, guarded: bool) -> list[dict[str, Any]]:
    """Return the values after these steps, and after each later one."""
    seen = []
    for later in (None, *LATER):
        switches.reset()
        for step in steps:
            STEPS[step](switches)
        if guarded:
            with fp32_guard(frameworks=["torch"]):
                inside = switches.read()
                assert inside["_get_float32_matmul_precision"] == "highest"
                assert inside["_get_cublas_allow_tf32"] is inside["_get_cudnn_allow_tf32"] is False
                assert {inside[f"{b}.{o}"] for b, o in LEAVES} == {"ieee"}
        if later is not None:
            STEPS[later](switches)
        seen.append(switches.read())
    return seen


def test_every_start_state_of_pytorch_is_restored(switches: Switches) -> None:
    """After the guard, PyTorch is as without it: in the values, and in the effect of each later step."""
    rng = random.Random(0)
    states = [(), *((a,) for a in STEPS), *itertools.permutations(STEPS, 2)]
    states += [tuple(rng.choices(list(STEPS), k=rng.randint(3, 8))) for _ in range(300)]
    bad = [s for s in states if history(switches, s, guarded=False) != history(switches, s, guarded=True)]
    assert bad == []


def test_settings_made_inside_are_kept(switches: Switches) -> None:
    old("medium")(switches)
    with pytest.warns(LowprecWarning, match=r"mkldnn\.matmul\.fp32_precision = 'tf32'.*kept"), fp32_guard():
        switches.put("mkldnn", "matmul", "tf32")
    read = switches.read()
    assert (read["cuda.matmul"], read["mkldnn.matmul"]) == ("tf32", "tf32")
    assert read["cuda.conv"] == "tf32"


@pytest.mark.parametrize(("mode", "word", "onednn"), [("tf32", "high", "tf32"), ("bf16", "medium", "bf16")])
def test_a_mode_sets_pytorch(switches: Switches, mode: str, word: str, onednn: str) -> None:
    before = switches.read()
    with math_mode(mode, frameworks=["torch"]):
        assert switches.torch.get_float32_matmul_precision() == word
        assert switches.get("mkldnn", "matmul") == onednn
        with fp32_guard():
            assert switches.torch.get_float32_matmul_precision() == "highest"
        assert switches.torch.get_float32_matmul_precision() == word
    assert switches.read() == before


# -- PyTorch: the numbers -------------------------------------------------------------------------

N = 512


@pytest.fixture(params=["of this machine", "imitated"])
def lowers(request: pytest.FixtureRequest, switches: Switches) -> Iterator[bool]:
    """Multiply on such units as there are; return whether "medium" lowers the precision of float32 products there."""
    if request.param == "imitated":
        with imitated_units(switches.torch):
            yield True
    else:
        yield medium_lowers(N)


def _spd(rng: np.random.Generator) -> np.ndarray:
    a = rng.standard_normal((N, N)) / np.sqrt(N)
    return a @ a.T + np.eye(N)


def _normal_equations(torch: Any, a: Any, b: Any) -> Any:
    return torch.linalg.solve(a.T @ a, a.T @ b)


CASES: dict[str, tuple[Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]], Any]] = {
    "matmul": (lambda rng: tuple(rng.standard_normal((2, N, N))), lambda torch, a, b: a @ b),
    "cdist": (lambda rng: tuple(rng.standard_normal((2, N, N))), lambda torch, a, b: torch.cdist(a, b)),
    "normal equations": (lambda rng: (_spd(rng), rng.standard_normal((N, 64))), _normal_equations),
}


def errors(torch: Any, case: str, rng: np.random.Generator) -> tuple[float, float, float]:
    """Return the errors against float64: at "highest", at "medium", and at "medium" inside the guard."""
    make, run = CASES[case]
    exact = [torch.from_numpy(np.ascontiguousarray(x)) for x in make(rng)]
    operands = [x.float() for x in exact]
    # The rounding of the operands to float32 is not the library's doing.
    right = run(torch, *(x.double() for x in operands))

    def error() -> float:
        return float((run(torch, *operands).double() - right).norm() / right.norm())

    torch.set_float32_matmul_precision("highest")
    full = error()
    torch.set_float32_matmul_precision("medium")
    low = error()
    with fp32_guard():
        guarded = error()
    assert torch.get_float32_matmul_precision() == "medium"
    return full, low, guarded


@pytest.mark.parametrize("case", CASES)
def test_the_error_inside_is_that_of_full_fp32(
    switches: Switches, case: str, lowers: bool, rng: np.random.Generator
) -> None:
    full, low, guarded = errors(switches.torch, case, rng)
    # Two sums in another order differ by less than their own error; bfloat16 has 16 bits less than float32.
    assert guarded <= 2 * full
    assert full < 1e-4
    assert (low > 30 * full) is lowers


# -- JAX ------------------------------------------------------------------------------------------


def precisions(jax: Any, function: Callable[..., Any]) -> set[str]:
    """Return the precision of every product in what JAX hands to its compiler."""
    x = jax.ShapeDtypeStruct((8, 8), np.float32)
    text = jax.jit(function).lower(x, x).as_text()
    lines = [line for line in text.splitlines() if "dot_general" in line]
    assert lines
    return {line.split("precision = [")[1].split("]")[0] if "precision = [" in line else "DEFAULT" for line in lines}


@pytest.mark.parametrize("form", ["@", "einsum", "jit"])
def test_jax_traces_at_the_highest_precision_inside(jax: Any, form: str) -> None:
    forms = {
        "@": lambda a, b: a @ b,
        "einsum": lambda a, b: jax.numpy.einsum("ij,jk->ik", a, b),
        "jit": jax.jit(lambda a, b: a @ b),
    }
    function = forms[form]
    assert precisions(jax, lambda a, b: function(a, b)) == {"DEFAULT, DEFAULT"}
    with fp32_guard():
        assert precisions(jax, lambda a, b: function(a, b)) == {"HIGHEST, HIGHEST"}
        with math_mode("bf16", frameworks=True):
            assert precisions(jax, lambda a, b: function(a, b)) == {"HIGHEST, HIGHEST"}
    assert precisions(jax, lambda a, b: function(a, b)) == {"DEFAULT, DEFAULT"}


def test_a_precision_of_the_user_s_comes_back(jax: Any) -> None:
    now = lambda: jax.config.jax_default_matmul_precision  # noqa: E731
    assert now() is None
    with jax.default_matmul_precision("bfloat16"):
        with fp32_guard():
            assert now() == "highest"
            with jax.default_matmul_precision("high"):
                assert now() == "high"
                with fp32_guard():
                    assert now() == "highest"
                assert now() == "high"
            assert now() == "highest"
        assert now() == "bfloat16"
    assert now() is None


# -- every library that is here -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_entries_of_info(name: str) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed")
    controller = next(c for c in controllers() if c.name == name)
    shown = [row for row in info()["frameworks"] if row["library"] == name]
    assert {row["switch"] for row in shown} == set(controller.switches)
    assert {row["tier"] for row in shown} == {str(controller.tier)}
    assert all(row["problem"] is None for row in shown)
    with math_mode("tf32", frameworks=[name]):
        inside = [row["value"] for row in info()["frameworks"] if row["library"] == name]
    assert set(inside) & {"tf32", "tensorfloat32"}


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_the_modes_of_a_library_can_all_be_set(name: str) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed")
    controller = next(c for c in controllers() if c.name == name)
    before = controller.save()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mode in controller.modes:
            with math_mode(mode, frameworks=[name]):
                pass
    assert controller.save() == before
    assert MathMode.FP32 in controller.modes
