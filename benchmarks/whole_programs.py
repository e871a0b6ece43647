"""Models of PyTorch, transformers, timm and equinox and a NumPy program under `intercept`: errors, reports, and times.

usage: python benchmarks/whole_programs.py [errors] [times]

Errors are relative to the library's float32, of the output and of all gradients. Times are of one thread, relative to
plain PyTorch; the variants take turns, and the median of the ratios by round is shown. Models have random weights;
those of libraries that are not installed are skipped.
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
    yield "ConvNeXt", partial(timm.create_model, "convnext_atto"), images


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
    parts = {"errors": show_errors, "times": show_times}
    for part in sys.argv[1:] or parts:
        parts[part]()
