"""A call of each public function in a function of ``torch.compile``: products in its graph, the others outside."""

import numpy as np
import pytest

import lowprec
from frameworks.backends import Backend
from frameworks.conftest import load_or_skip


@pytest.fixture(scope="module")
def operands():
    torch = load_or_skip(Backend.TORCH).torch
    x = torch.eye(16) + torch.arange(256.0).reshape(16, 16) / 256
    others = {"row": x[0], "ones": torch.ones_like(x), "positive": x @ x.T, "gradients": [x * 1e-9]}
    others["images"] = x[:, None]
    others["format"] = lowprec.Format(exponent=3, mantissa=2)
    others["decorated"] = lowprec.math_mode("bf16")(lambda x: lowprec.matmul(x, x))
    kept = {"quantized": lowprec.quantize(x, "mxfp8"), "prepared": lowprec.prepare(x)}
    return {"torch": torch, "lowprec": lowprec, "x": x, **others, **kept}


#: Calls that are not traced, by public name.
UNTRACED = {
    "amp": ("lowprec.amp.suggest_scale(gradients)", "repr(lowprec.amp.gradient_report(gradients))"),
    "autotune": ("lowprec.autotune(x, x)",),
    "check": ("lowprec.check(x, x, modes=['bf16'], budget=0).within",),
    "compare": ("lowprec.compare(lambda: x @ x, 'bf16').verdict",),
    "conv": ("lowprec.conv(images, images)",),
    "emulation": ("lowprec.emulation.mma(ones, ones, ones, arch='hopper', format='bf16')",),
    "audit": ("str(lowprec.audit(libraries=['numpy'], sizes=[16]))",),
    "info": ("lowprec.info()['version']",),
    "linalg": (
        *(f"lowprec.linalg.{name}(positive)" for name in ("cholesky", "det", "expm", "inv", "matrix_rank", "pinv")),
        *(f"tuple(lowprec.linalg.{name}(x))" for name in ("eigh", "qr", "slogdet", "svd")),
        *(f"lowprec.linalg.solve(x, row, method={method!r})" for method in ("direct", "refine", "auto")),
        "lowprec.linalg.lstsq(x, x).solution",
        "lowprec.linalg.multi_dot([x, x, x])",
    ),
    "matmul": ("lowprec.matmul(x, x, k_chunk=8, math_mode='bf16')",),
    "plan": ("str(lowprec.plan(x, x, math_mode='bf16'))",),
    "prepare": ("lowprec.prepare(x).shape", "lowprec.matmul(x, lowprec.prepare(x))", "lowprec.matmul(x, prepared)"),
    "PreparedOperand": ("prepared.T.shape",),
    "quantize": ("lowprec.quantize(x, 'nvfp4', axis=0).dequantize()", "lowprec.matmul(x, lowprec.quantize(x, 'fp8'))"),
    "QuantizedArray": ("quantized.dequantize()", "quantized.T.dequantize()", "lowprec.linear(x, quantized)"),
    "release_memory": ("lowprec.release_memory()",),
}  # fmt: skip

#: Calls in graphs, and ``with`` statements, which break graphs.
TRACED = {
    "MathMode": ("lowprec.matmul(x, x, math_mode=lowprec.MathMode.BF16)",),
    "Recipe": ("lowprec.matmul(x, x, math_mode=lowprec.Recipe('mxfp8', scale_rule='rceil'))",),
    "Format": ("lowprec.matmul(x, x, math_mode=format)",),
    "ShapeDtype": ("lowprec.ShapeDtype((2, 2), 'float32').shape",),
    "einsum": ("lowprec.einsum('ij,jk,kl->il', x, x, x)",),
    "emulate": ("with lowprec.emulate('hopper'): found = lowprec.matmul(x, x, math_mode='bf16')",),
    "fp32_guard": ("with lowprec.fp32_guard(): found = lowprec.matmul(x, x, math_mode='bf16')",),
    "get_math_mode": ("lowprec.get_math_mode()",),
    "intercept": ("with lowprec.intercept('bf16'): found = x @ x",),
    "linear": ("lowprec.linear(x, x, row)",),
    "math_mode": ("with lowprec.math_mode('bf16'): found = lowprec.matmul(x, x)", "decorated(x)"),
    "matmul": (
        "lowprec.matmul(x, x, bias=row, math_mode='bf16')",
        "lowprec.matmul(x, x, out=torch.empty(16, 16), math_mode='bf16')",
        "torch.from_numpy(lowprec.matmul(x.numpy(), x.numpy(), math_mode='bf16'))",
    ),
    "profile": ("with lowprec.profile() as seen: found = lowprec.matmul(x, x)",),
    "set_math_mode": ("lowprec.set_math_mode(None)",),
    "tensordot": ("lowprec.tensordot(x, x, axes=1)",),
    "vecdot": ("lowprec.vecdot(x, x)",),
}

#: Not called here: they take no tensors and return none.
OTHERS = {"DLPackArray", "__version__", "cublas_handle", "register_controller", "testing"}


def test_every_public_function_is_called():
    errors = {name for name in lowprec.__all__ if name.endswith(("Error", "Warning"))}
    assert set(lowprec.__all__) == UNTRACED.keys() | TRACED.keys() | OTHERS | errors


CALLS = [
    (text, calls is UNTRACED)
    for calls in (UNTRACED, TRACED)
    for texts in calls.values()
    for text in texts
]


@pytest.mark.parametrize(("text", "outside"), CALLS, ids=[text for text, _ in CALLS])
@pytest.mark.filterwarnings("ignore:Dynamo")
def test_a_compiled_call(text, outside, operands):
    torch, graphs = operands["torch"], []
    torch._dynamo.reset()
    statement = text if text.startswith("with") else f"found = {text}"
    names = dict(operands)
    exec(f"def call():\n    {statement}\n    return found", names)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    found, want = torch.compile(names["call"], backend=backend)(), names["call"]()
    for x, y in zip(*(z if isinstance(z, tuple) else (z,) for z in (found, want)), strict=True):
        assert type(x) is type(y)
        if isinstance(x, torch.Tensor):
            np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=1e-5, atol=1e-5)
        else:
            assert x == y
    torch._dynamo.reset()
    # What is called outside graphs runs as without the compiler: it has no graph of its own.
    assert not (outside and graphs)
