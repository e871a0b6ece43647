"""The guard over PyTorch and JAX: real switches, which come back."""

import itertools
import random
import warnings

import numpy as np
import pytest

from lowprec import LowprecWarning, MathMode, fp32_guard, info, math_mode
from lowprec.policy.controllers import controllers

LEAVES = [
    (backend, operation)
    for backend in ("cuda", "mkldnn")
    for operation in ("matmul", "conv", "rnn")
]
ALL = [("generic", "all"), ("cuda", "all"), ("mkldnn", "all")]


class Switches:
    """The switches by name, with their start state."""

    def __init__(self, torch):
        self.torch = torch
        self.get = torch._C._get_fp32_precision_getter
        self.put = torch._C._set_fp32_precision_setter

    def reset(self):
        self.torch.set_float32_matmul_precision("highest")
        self.torch._C._set_cudnn_allow_tf32(True)
        for pair in [*ALL, *LEAVES]:
            # CUDA's convolutions start with TF32.
            self.put(*pair, "tf32" if pair in (("cuda", "conv"), ("cuda", "rnn")) else "none")

    def read(self):
        """Return the values as a user reads them, refusals included."""

        def tried(getter):
            try:
                return getter()
            except RuntimeError:
                return "refused"

        found = {
            f"{backend}.{operation}": self.get(backend, operation)
            for backend, operation in [*ALL, *LEAVES]
        }
        old = ("_get_float32_matmul_precision", "_get_cudnn_allow_tf32", "_get_cublas_allow_tf32")
        return {**found, **{name: tried(getattr(self.torch._C, name)) for name in old}}


@pytest.fixture
def switches(torch):
    """PyTorch's switches, in their start state."""
    found = Switches(torch)
    found.reset()
    yield found
    found.reset()


def old(word):
    return lambda s: s.torch.set_float32_matmul_precision(word)


def new(backend, operation, value):
    return lambda s: s.put(backend, operation, value)


#: Every way to set a switch, old and new.
STEPS = {
    **{f"old {word}": old(word) for word in ("highest", "high", "medium")},
    "cudnn off": lambda s: setattr(s.torch.backends.cudnn, "allow_tf32", False),
    "cudnn on": lambda s: setattr(s.torch.backends.cudnn, "allow_tf32", True),
    "cublas on": lambda s: setattr(s.torch.backends.cuda.matmul, "allow_tf32", True),
    "cublas off": lambda s: setattr(s.torch.backends.cuda.matmul, "allow_tf32", False),
    **{f"{b}.{o} {v}": new(b, o, v) for b, o in [*LEAVES, *ALL] for v in ("ieee", "tf32", "none")},
    **{f"{b}.{o} bf16": new(b, o, "bf16") for b, o in [*LEAVES[3:], ALL[0], ALL[2]]},
}
# Steps that show whether a switch still follows another.
LATER = ["generic.all tf32", "generic.all ieee", "cuda.all tf32", "mkldnn.all bf16", "old medium"]


def history(switches, steps, *, guarded):
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


def test_every_start_state_of_pytorch_is_restored(switches):
    """After the guard, PyTorch is as without it: in the values, and in the effect of each later step."""
    rng = random.Random(0)
    states = [(), *((a,) for a in STEPS), *itertools.permutations(STEPS, 2)]
    states += [tuple(rng.choices(list(STEPS), k=rng.randint(3, 8))) for _ in range(300)]
    bad = [
        s
        for s in states
        if history(switches, s, guarded=False) != history(switches, s, guarded=True)
    ]
    assert bad == []


def test_settings_made_inside_are_kept(switches):
    old("medium")(switches)
    with (
        pytest.warns(LowprecWarning, match=r"mkldnn\.matmul\.fp32_precision = 'tf32'.*kept"),
        fp32_guard(),
    ):
        switches.put("mkldnn", "matmul", "tf32")
    read = switches.read()
    assert (read["cuda.matmul"], read["mkldnn.matmul"]) == ("tf32", "tf32")
    assert read["cuda.conv"] == "tf32"


@pytest.mark.parametrize(
    ("mode", "word", "onednn"), [("tf32", "high", "tf32"), ("bf16", "medium", "bf16")]
)
def test_a_mode_sets_pytorch(switches, mode, word, onednn):
    before = switches.read()
    with math_mode(mode, frameworks=["torch"]):
        assert switches.torch.get_float32_matmul_precision() == word
        assert switches.get("mkldnn", "matmul") == onednn
        with fp32_guard():
            assert switches.torch.get_float32_matmul_precision() == "highest"
        assert switches.torch.get_float32_matmul_precision() == word
    assert switches.read() == before


def precisions(jax, function):
    """Return the precision of every product in what JAX hands to its compiler."""
    x = jax.ShapeDtypeStruct((8, 8), np.float32)
    text = jax.jit(function).lower(x, x).as_text()
    lines = [line for line in text.splitlines() if "dot_general" in line]
    assert lines
    return {
        line.split("precision = [")[1].split("]")[0] if "precision = [" in line else "DEFAULT"
        for line in lines
    }


@pytest.mark.parametrize("jitted", [False, True])
def test_jax_traces_at_the_highest_precision_inside(jax, jitted):
    function = jax.jit(lambda a, b: a @ b) if jitted else lambda a, b: a @ b
    assert precisions(jax, lambda a, b: function(a, b)) == {"DEFAULT, DEFAULT"}
    with fp32_guard():
        assert precisions(jax, lambda a, b: function(a, b)) == {"HIGHEST, HIGHEST"}
        with math_mode("bf16", frameworks=True):
            assert precisions(jax, lambda a, b: function(a, b)) == {"HIGHEST, HIGHEST"}
    assert precisions(jax, lambda a, b: function(a, b)) == {"DEFAULT, DEFAULT"}


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_entries_of_info(name):
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
def test_the_modes_of_a_library_can_all_be_set(name):
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
