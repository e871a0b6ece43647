"""Models of PyTorch, transformers and others and a NumPy program under `intercept`: errors, shares, and times.

usage: python benchmarks/whole_programs.py [errors] [shares] [times]

Errors are relative to the library's float32, of the output and of all gradients. A share is the number of
multiplications that lowprec reports as its own, relative to the number by the shapes of the arguments of PyTorch's
functions. Times are of one thread, relative to plain PyTorch; the variants take turns, and the median of the ratios by
round is shown. Models have random weights; those of libraries that are not installed are skipped.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import numpy as np
import timing
import torch
from model_invariance import WORDS, LanguageModel, ResNet
from torch.overrides import TorchFunctionMode

import lowprec.jax
import lowprec.numpy
import lowprec.torch

MODES = ("fp32", "bf16")
#: A program's results, by name.
Program = Callable[[], dict[str, Any]]
#: Name, creation, and the arguments of a call.
Model = tuple[str, Callable[[], Any], dict[str, Any]]


def models() -> Iterator[Model]:
    torch.manual_seed(0)
    yield "GRU", partial(torch.nn.GRU, 32, 32, 2), {"input": torch.randn(8, 2, 32)}
    for name, of_library in (("transformers", models_of_transformers), ("timm", models_of_timm)):
        try:
            yield from of_library()
        except ImportError:
            print(f"{name} is not installed")


def models_of_timm() -> Iterator[Model]:
    """Yield a vision transformer and a network of convolutions."""
    import timm

    images = {"x": torch.randn(2, 3, 64, 64)}
    yield (
        "ViT, timm",
        partial(timm.create_model, "vit_tiny_patch16_224", img_size=64, depth=2),
        images,
    )
    yield "ConvNeXt, timm", partial(timm.create_model, "convnext_atto"), images


def models_of_transformers() -> Iterator[Model]:
    """Yield models of text, images and sound."""
    import transformers as t

    wide = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    text = {**wide, "vocab_size": 100}
    of_text = {"input_ids": torch.randint(0, 100, (2, 16))}
    of_image, of_sound = (
        {"pixel_values": torch.randn(2, 3, 32, 32)},
        {"input_features": torch.randn(1, 8, 100)},
    )
    whisper = t.WhisperConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=100, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, max_source_positions=50, num_mel_bins=8,
    )  # fmt: skip
    t5 = t.T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=100)
    mixtral = t.MixtralConfig(**text, num_key_value_heads=2, num_local_experts=4)
    gpt2 = t.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100)
    yield "BERT", partial(t.BertModel, t.BertConfig(**text)), of_text
    yield "GPT-2", partial(t.GPT2LMHeadModel, gpt2), of_text
    yield (
        "Llama",
        partial(t.LlamaForCausalLM, t.LlamaConfig(**text, num_key_value_heads=2)),
        of_text,
    )
    yield "Mixtral", partial(t.MixtralForCausalLM, mixtral), of_text
    ids = of_text["input_ids"]
    yield "T5", partial(t.T5ForConditionalGeneration, t5), {**of_text, "decoder_input_ids": ids}
    yield (
        "Whisper",
        partial(t.WhisperForConditionalGeneration, whisper),
        {**of_sound, "decoder_input_ids": ids[:1]},
    )
    convnext = t.ConvNextConfig(hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 2, 1])
    yield "ConvNeXt", partial(t.ConvNextModel, convnext), of_image
    yield "ViT", partial(t.ViTModel, t.ViTConfig(**wide, image_size=32, patch_size=8)), of_image


def step(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the output, and all gradients of its mean square."""
    model.zero_grad()
    y = model(**inputs)
    y = y if isinstance(y, torch.Tensor) else y[0]
    y.square().mean().backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return {"output": y.detach(), "gradients": gradients}


def show_errors() -> None:
    for name, create, inputs in models():
        torch.manual_seed(0)
        compare(name, partial(step, create().eval(), inputs), lowprec.torch.intercept)
    of_numpy = partial(lowprec.numpy.intercept, cast=True)
    for name, program, intercept in (
        ("digits, NumPy", digits, of_numpy),
        ("equinox", equinox, lowprec.jax.intercept),
    ):
        try:
            compare(name, program(), intercept)
        except ImportError as error:
            print(f"{name}: {error}")


def compare(name: str, run: Program, intercept: Callable[[str], Any]) -> None:
    """Print errors by mode, the number of products that were taken, and the reasons for the others."""
    true = run()
    for mode in MODES:
        with intercept(mode) as seen:
            found = run()
        errors = [
            f"{what} {np.linalg.norm(found[what] - x) / np.linalg.norm(x):.1e}"
            for what, x in true.items()
        ]
        report = seen.report()
        passed = {p.operator: p.reason for p in report.passed}
        taken = sum(p.count for p in report.taken)
        print(f"{name:13} {mode:5} {' '.join(errors)} taken {taken}; {passed or 'all taken'}")


def digits() -> Program:
    """Return a training of a network in NumPy's float64 on scikit-learn's digits, by ``@``, ``dot`` and ``einsum``."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, targets = images / 16 - 0.5, np.eye(10)[labels]

    def train() -> dict[str, Any]:
        rng = np.random.default_rng(0)
        w, v = rng.normal(0, 1 / 8, (64, 64)), rng.normal(0, 1 / 8, (64, 10))
        for _ in range(10):
            hidden = np.maximum(x @ w, 0)
            scores = np.exp(np.dot(hidden, v))
            error = (scores / scores.sum(1, keepdims=True) - targets) / len(x)
            back = np.einsum("no,ho->nh", error, v) * (hidden > 0)
            v -= 2 * np.einsum("nh,no->ho", hidden, error)
            w -= 2 * x.T @ back
        return {"weights after 10 steps": w}

    return train


def equinox() -> Program:
    """Return a computation of the gradients of attention, a perceptron and a recurrent cell of equinox."""
    import equinox as eqx

    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    model = (
        eqx.nn.MultiheadAttention(4, 32, key=keys[0]), eqx.nn.MLP(32, 32, 64, 2, key=keys[1]),
        eqx.nn.GRUCell(32, 32, key=keys[2]),
    )  # fmt: skip

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(model: Any, x: Any) -> Any:
        attention, perceptron, cell = model
        x = jax.vmap(perceptron)(attention(x, x, x))
        return (jax.lax.scan(lambda h, each: (cell(each, h), None), x[0], x)[0] ** 2).mean()

    def gradients() -> dict[str, Any]:
        leaves = jax.tree_util.tree_leaves(gradient(model, jax.random.normal(keys[3], (12, 32))))
        return {"gradients": np.concatenate([np.ravel(leaf) for leaf in leaves])}

    return gradients


#: Functions of PyTorch that multiply matrices, or numbers of images by a weight.
PRODUCTS = [
    "linear",
    "matmul",
    "__matmul__",
    "__rmatmul__",
    "mm",
    "bmm",
    "grouped_mm",
    "_grouped_mm",
]
CONVOLUTIONS = ["conv1d", "conv2d", "conv3d"]
TRANSPOSED = ["conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]


class Multiplications(TorchFunctionMode):
    """Counts the multiplications of functions by the shapes of their arguments, and those of their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = 0
        self.backward = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.__name__
        given = [*args, *(kwargs or {}).values()]
        if name in PRODUCTS:
            self.add(result.numel() * given[0].shape[-1], given[:2], result)
        elif name in CONVOLUTIONS:
            self.add(result.numel() * given[1][0].numel(), given[:2], result)
        elif name in TRANSPOSED:
            self.add(given[0].numel() * given[1][0].numel(), given[:2], result)
        elif name in ("addmm", "baddbmm"):
            self.add(result.numel() * given[1].shape[-1], given[1:3], result)
        elif name in ("lstm", "gru"):
            self.add_recurrent(*given[:3], result[0])
        elif name == "scaled_dot_product_attention":
            q, k, v = given[:3]
            scores = q.shape[:-1].numel() * k.shape[-2]
            self.add(scores * q.shape[-1], (q, k, q), result)  # the gradient computes scores again
            self.add(scores * v.shape[-1], (q, v), result)
        return result

    def add(self, count: int, operands: Any, result: Any) -> None:
        self.forward += count
        self.add_gradients(count * sum(x.requires_grad for x in operands), result)

    def add_gradients(self, count: int, result: Any) -> None:
        """Count multiplications where a gradient of the result is computed."""

        def add(_: Any) -> None:
            self.backward += count

        if result.requires_grad:
            result.register_hook(add)

    def add_recurrent(self, x: Any, states: Any, weights: Any, result: Any) -> None:
        """Count layers whose first states have no gradient; the batch is the second axis of the states."""
        tokens = x.shape[:-1].numel()
        first = states[0].shape[-2]
        matrices = [weight for weight in weights if weight.ndim == 2]
        for of_input, of_state in zip(matrices[::2], matrices[1::2], strict=True):
            self.add(tokens * of_input.numel(), (x, of_input), result)
            self.add(tokens * of_state.numel(), (of_state,), result)
            self.add_gradients((tokens - first) * of_state.numel(), result)
            x = of_state  # whose gradient is computed, as that of the next layer's input


def networks() -> Iterator[Model]:
    """Yield models of which some have more kinds of products than those above."""
    torch.manual_seed(0)
    yield "ResNet-50", ResNet, {"x": torch.randn(2, 3, 64, 64)}
    yield "LSTM", LanguageModel, {"x": torch.randint(0, WORDS, (2, 16))}
    try:
        from diffusers import UNet2DConditionModel
    except ImportError:
        print("diffusers is not installed")
        return
    unet = partial(
        UNet2DConditionModel, sample_size=16, block_out_channels=(32, 64), cross_attention_dim=48,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip
    inputs = {
        "sample": torch.randn(2, 4, 16, 16),
        "timestep": torch.tensor([3, 7]),
        "encoder_hidden_states": torch.randn(2, 9, 48),
    }
    yield "diffusion U-Net", unet, inputs


def show_shares() -> None:
    """Print the share of the multiplications that lowprec computes, by an independent count."""
    print(
        "model | multiplications | share forward | share of a training step | computed by PyTorch"
    )
    for name, create, inputs in (*networks(), *models()):
        model = create().eval()
        shares = []
        passed = {}
        with Multiplications() as counted:
            step(model, inputs)
        for training in (False, True):
            with lowprec.torch.intercept("bf16") as seen, torch.set_grad_enabled(training):
                step(model, inputs) if training else model(**inputs)
            report = seen.report()
            taken = sum(p.multiplications for p in report.taken)
            shares.append(f"{taken / (counted.forward + counted.backward * training):.2%}")
            passed |= {f"{p.operator}: {p.reason}": None for p in report.passed}
        print(name, f"{counted.forward:.3g}", *shares, "; ".join(passed), sep=" | ", flush=True)


def steps() -> Iterator[tuple[str, Callable[[], Any], int]]:
    """Yield the name of a program, a step of it, and the number of steps of a sample."""
    nn = torch.nn
    mlp = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.ReLU())])
    yield "MLP 4 x 32, training", partial(step, mlp, {"input": torch.randn(32, 32)}), 30
    gru, sequence = nn.GRU(64, 64), torch.randn(16, 4, 64)
    yield "GRU, inference", torch.no_grad()(lambda: gru(sequence)), 15
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
    yield (
        "encoder 256, training",
        partial(step, nn.TransformerEncoder(layer, 3), {"src": torch.randn(4, 128, 256)}),
        1,
    )
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        return
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=384, n_layer=4, n_head=6, vocab_size=1000)).eval()
    ids = torch.randint(0, 1000, (1, 8))
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    yield "GPT-2 4 x 384, generation", torch.no_grad()(lambda: gpt2.generate(ids, **options)), 1


def sample(run: Callable[[], Any], count: int, mode: str, _: int) -> float:
    """Return the time of a step, after an untimed one."""
    with nullcontext() if mode == "plain" else lowprec.torch.intercept(mode):
        run()
        start = time.perf_counter()
        for _ in range(count):
            run()
        return (time.perf_counter() - start) / count


def show_times() -> None:
    """Print the time of each program in each mode, relative to plain PyTorch."""
    torch.set_num_threads(1)
    for name, run, count in steps():
        seconds = timing.take_turns(("plain", *MODES), partial(sample, run, count), rounds=9)
        plain = seconds["plain"]
        shown = ", ".join(
            f"{mode} {timing.speed_ratio(seconds[mode], plain)['median']:.2f}" for mode in MODES
        )
        print(
            f"{name:26} plain {1e3 * statistics.median(plain):.2f} ms; time relative to it: {shown}"
        )


if __name__ == "__main__":
    parts = {"errors": show_errors, "shares": show_shares, "times": show_times}
    for part in sys.argv[1:] or parts:
        parts[part]()
