"""Models of PyTorch, transformers, timm and equinox and a NumPy program under `intercept`: errors, reports, and times.

usage: python benchmarks/whole_programs.py [errors] [times]

Errors are relative to the library's float32, of the output and of all gradients. Times are of one thread, relative to
plain PyTorch; the variants take turns, and the median of the ratios of neighbours is shown. Models have random weights;
those of libraries that are not installed are skipped.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

import lowprec.numpy
import lowprec.torch

MODES = ("fp32", "bf16")
Model = tuple[Any, Callable[[], Any]]


def models() -> Iterator[tuple[str, Callable[[], Model]]]:
    """Yield names and functions that create a model and a call of it."""
    yield "GRU", gru
    for name, of_library in (("transformers", models_of_transformers), ("timm", models_of_timm)):
        try:
            yield from of_library()
        except ImportError:
            print(f"{name} is not installed")


def models_of_timm() -> Iterator[tuple[str, Callable[[], Model]]]:
    """Yield a vision transformer and a network of convolutions."""
    import timm

    def of(name: str, **options: Any) -> Callable[[], Model]:
        def create() -> Model:
            model, images = timm.create_model(name, **options).eval(), torch.randn(2, 3, 64, 64)
            return model, lambda: model(images)

        return create

    yield "ViT, timm", of("vit_tiny_patch16_224", img_size=64, depth=2)
    yield "ConvNeXt", of("convnext_atto")


def models_of_transformers() -> Iterator[tuple[str, Callable[[], Model]]]:
    """Yield models of text, images and sound."""
    import transformers as t

    ids = torch.randint(0, 100, (2, 16))
    wide = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    text = {**wide, "vocab_size": 100}
    image, sound = torch.randn(2, 3, 32, 32), torch.randn(1, 8, 100)

    def of(kind: Any, config: Any, *args: Any, **keywords: Any) -> Callable[[], Model]:
        def create() -> Model:
            model = kind(config).eval()
            return model, lambda: model(*args, **keywords)[0]

        return create

    whisper = t.WhisperConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=100, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, max_source_positions=50, num_mel_bins=8,
    )  # fmt: skip
    t5 = t.T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=100)
    yield "BERT", of(t.BertModel, t.BertConfig(**text), ids)
    yield "GPT-2", of(t.GPT2LMHeadModel, t.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100), ids)
    yield "Llama", of(t.LlamaForCausalLM, t.LlamaConfig(**text, num_key_value_heads=2), ids)
    mixtral = t.MixtralConfig(**text, num_key_value_heads=2, num_local_experts=4)
    yield "Mixtral", of(t.MixtralForCausalLM, mixtral, ids)
    yield "T5", of(t.T5ForConditionalGeneration, t5, input_ids=ids, decoder_input_ids=ids)
    yield "Whisper", of(t.WhisperForConditionalGeneration, whisper, sound, decoder_input_ids=ids[:1])
    yield "ViT", of(t.ViTModel, t.ViTConfig(**wide, image_size=32, patch_size=8), image)


def gru() -> Model:
    model, x = torch.nn.GRU(32, 32, 2), torch.randn(8, 2, 32)
    return model, lambda: model(x)[0]


def step(model: Any, run: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the output, and all gradients of its mean square."""
    model.zero_grad()
    y = run()
    y.square().mean().backward()
    return y.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def show_errors() -> None:
    """Print the errors of each model, and the operators that were not taken."""
    for name, create in models():
        torch.manual_seed(0)
        model, run = create()
        true = step(model, run)
        for mode in MODES:
            with lowprec.torch.intercept(mode) as seen:
                found = step(model, run)
            errors = [f"{float((x - y).norm() / y.norm()):.1e}" for x, y in zip(found, true, strict=True)]
            show(name, mode, f"output {errors[0]} gradients {errors[1]}", seen)
    for name, run in (("digits, NumPy", train_digits), ("equinox", train_equinox)):
        try:
            run(name)
        except ImportError as error:
            print(f"{name}: {error}")


def show(name: str, mode: str, errors: str, seen: Any) -> None:
    """Print errors, the number of products that were taken, and the reasons for the others."""
    report = seen.report()
    passed = {p.operator: p.reason for p in report.passed}
    print(f"{name:13} {mode:5} {errors} taken {sum(p.count for p in report.taken)}; {passed or 'all taken'}")


def train_digits(name: str) -> None:
    """Train a network in NumPy's float64 on scikit-learn's digits, by ``@``, ``dot`` and ``einsum``."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, targets = images / 16 - 0.5, np.eye(10)[labels]

    def train() -> Any:
        rng = np.random.default_rng(0)
        w, v = rng.normal(0, 1 / 8, (64, 64)), rng.normal(0, 1 / 8, (64, 10))
        for _ in range(10):
            hidden = np.maximum(x @ w, 0)
            scores = np.exp(np.dot(hidden, v))
            error = (scores / scores.sum(1, keepdims=True) - targets) / len(x)
            back = np.einsum("no,ho->nh", error, v) * (hidden > 0)
            v -= 2 * np.einsum("nh,no->ho", hidden, error)
            w -= 2 * x.T @ back
        return w

    true = train()
    for mode in MODES:
        with lowprec.numpy.intercept(mode, cast=True) as seen:
            found = train()
        show(name, mode, f"weights after 10 steps {np.linalg.norm(found - true) / np.linalg.norm(true):.1e}", seen)


def train_equinox(name: str) -> None:
    """Compute the gradients of attention, a perceptron and a recurrent cell of equinox."""
    import equinox as eqx
    import jax

    import lowprec.jax

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

    def gradients() -> Any:
        leaves = jax.tree_util.tree_leaves(gradient(model, jax.random.normal(keys[3], (12, 32))))
        return np.concatenate([np.ravel(leaf) for leaf in leaves])

    true = gradients()
    for mode in MODES:
        with lowprec.jax.intercept(mode) as seen:
            found = gradients()
        show(name, mode, f"gradients {np.linalg.norm(found - true) / np.linalg.norm(true):.1e}", seen)


def steps() -> Iterator[tuple[str, Callable[[], Any], int]]:
    """Yield the name of a program, a step of it, and the number of steps of a sample."""
    nn = torch.nn
    mlp = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.ReLU())])
    small, sequence, tokens = torch.randn(32, 32), torch.randn(16, 4, 64), torch.randn(4, 128, 256)
    yield "MLP 4 x 32, training", lambda: step(mlp, lambda: mlp(small)), 30
    model = nn.GRU(64, 64)
    yield "GRU, inference", torch.no_grad()(lambda: model(sequence)), 15
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 3)
    yield "encoder 256, training", lambda: step(encoder, lambda: encoder(tokens)), 1
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        return
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=384, n_layer=4, n_head=6, vocab_size=1000)).eval()
    ids = torch.randint(0, 1000, (1, 8))
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    yield "GPT-2 4 x 384, generation", torch.no_grad()(lambda: gpt2.generate(ids, **options)), 1


def sample(run: Callable[[], Any], count: int, mode: str) -> float:
    """Return the time of a step, after an untimed one."""
    with lowprec.torch.intercept(mode) if mode else nullcontext():
        run()
        start = time.perf_counter()
        for _ in range(count):
            run()
        return (time.perf_counter() - start) / count


def show_times(rounds: int = 9) -> None:
    """Print the time of each program in each mode, relative to plain PyTorch."""
    torch.set_num_threads(1)
    for name, run, count in steps():
        times: dict[str, list[float]] = {mode: [] for mode in ("", *MODES)}
        for _ in range(rounds):
            for mode, found in times.items():
                found.append(sample(run, count, mode))
        ratios = {m: statistics.median(x / y for x, y in zip(times[m], times[""], strict=True)) for m in MODES}
        shown = ", ".join(f"{mode} {ratio:.2f}" for mode, ratio in ratios.items())
        print(f"{name:26} plain {1e3 * statistics.median(times['']):.2f} ms; time relative to it: {shown}")


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["errors", "times"]
    if "errors" in chosen:
        show_errors()
    if "times" in chosen:
        show_times()
