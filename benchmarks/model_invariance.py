"""Rows of whole models under `batch_invariant`: alone and in batches, with 1, 2 and 8 threads, prefill and decoding.

usage: python benchmarks/model_invariance.py [MODEL...]

Models have random weights; those of transformers are skipped where it is not installed. A row of the table is a model
in a mode: the rows of its results that were compared with those of the row alone on one thread, and how many differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import lowprec.torch

MODES = ("fp32", "bf16", "int8", "mxfp8")
BATCHES = (2, 7, 32)
THREADS = (1, 2, 8)
TOKENS = 18
WORDS = 90
#: Results of rows: of the whole input, and of one token after the other, if the model decodes.
Model = tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor] | None]


class LanguageModel(torch.nn.Module):
    """Two LSTM layers between an embedding and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, 44)
        self.lstm = torch.nn.LSTM(44, 52, 2, batch_first=True)
        self.head = torch.nn.Linear(52, WORDS)

    def forward(self, x: Tensor, states: Any = None) -> tuple[Tensor, Any]:
        y, states = self.lstm(self.embed(x), states)
        return self.head(y), states


class Bottleneck(torch.nn.Module):
    """Three convolutions, of which the second may have a stride, next to the input or a convolution of it."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        nn = torch.nn
        self.block = nn.Sequential(
            *convolution(channels, width, 1), nn.ReLU(),
            *convolution(width, width, 3, stride), nn.ReLU(),
            *convolution(width, 4 * width, 1),
        )  # fmt: skip
        self.other = nn.Identity()
        if stride > 1 or channels != 4 * width:
            self.other = nn.Sequential(*convolution(channels, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return (self.block(x) + self.other(x)).relu()


class ResNet(torch.nn.Sequential):
    """ResNet-50 (He et al. 2016), with the stride in the convolutions of 3 x 3."""

    def __init__(self) -> None:
        nn = torch.nn
        blocks = []
        channels = 64
        for count, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
            for i in range(count):
                blocks.append(Bottleneck(channels, width, 2 if i == 0 and width > 64 else 1))
                channels = 4 * width
        super().__init__(
            *convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
            *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def convolution(channels: int, filters: int, kernel: int, stride: int = 1) -> tuple[Any, Any]:
    convolved = torch.nn.Conv2d(channels, filters, kernel, stride, kernel // 2, bias=False)
    return convolved, torch.nn.BatchNorm2d(filters)


def models() -> Iterator[Model]:
    torch.manual_seed(0)
    resnet = ResNet().eval()
    yield "ResNet-50", lambda x: resnet(images(x)), None
    lstm = LanguageModel().eval()

    def one_by_one(x: Tensor) -> Tensor:
        states = None
        found = []
        for token in x.split(1, 1):
            y, states = lstm(token, states)
            found.append(y)
        return torch.cat(found, 1)

    yield "LSTM", lambda x: lstm(x)[0], one_by_one
    try:
        yield from models_of_transformers()
    except ImportError:
        print("transformers is not installed")


def models_of_transformers() -> Iterator[Model]:
    import transformers as t

    wide = {
        "hidden_size": 60,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "intermediate_size": 111,
        "vocab_size": WORDS,
    }
    bert = t.BertModel(t.BertConfig(**wide)).eval()
    yield "BERT", lambda x: bert(x)[0], None
    wide["num_key_value_heads"] = 2
    yield "Llama", *decoder(t.LlamaForCausalLM(t.LlamaConfig(**wide)))
    mixtral = t.MixtralForCausalLM(t.MixtralConfig(**wide, num_local_experts=4))
    mixtral.set_experts_implementation("eager")  # the other ones are fused kernels
    yield "Mixtral", *decoder(mixtral)
    config = t.WhisperConfig(
        d_model=60, encoder_layers=2, decoder_layers=2, encoder_attention_heads=6, decoder_attention_heads=6,
        encoder_ffn_dim=111, decoder_ffn_dim=111, vocab_size=WORDS, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, max_source_positions=50, num_mel_bins=8,
    )  # fmt: skip
    yield "Whisper", *speech(t.WhisperForConditionalGeneration(config))


def images(x: Tensor) -> Tensor:
    """Return images of 3 x 40 x 40 that depend on the first tokens of a row."""
    places = torch.arange(4800).view(3, 40, 40)
    return (x[:, :1, None, None] + 1.0) * places / 4800 % 1.0 - x[:, 1:2, None, None] / WORDS


def decoder(model: Any) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    model.eval()

    def one_by_one(x: Tensor) -> Tensor:
        cache = None
        found = []
        for token in x.split(1, 1):
            y = model(token, past_key_values=cache, use_cache=True)
            cache = y.past_key_values
            found.append(y.logits)
        return torch.cat(found, 1)

    return lambda x: model(x).logits, one_by_one


def speech(model: Any) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return a model of sound and text; the sound of a row depends on its text alone."""
    model.eval()
    places = torch.arange(800).view(8, 100)

    def sound(x: Tensor) -> Tensor:
        return (x[:, :1, None] + 1.0) * places / 800 % 1.0

    def one_by_one(x: Tensor) -> Tensor:
        encoded = model.model.encoder(sound(x))
        cache = None
        found = []
        for token in x.split(1, 1):
            y = model(
                encoder_outputs=encoded,
                decoder_input_ids=token,
                past_key_values=cache,
                use_cache=True,
            )
            cache = y.past_key_values
            found.append(y.logits)
        return torch.cat(found, 1)

    return lambda x: model(input_features=sound(x), decoder_input_ids=x).logits, one_by_one


def differing(run: Callable[[Tensor], Tensor], x: Tensor, alone: Tensor) -> tuple[int, int]:
    """Return the numbers of rows in batches, and of those that differ from the row alone."""
    compared = 0
    differ = 0
    for rows in BATCHES:
        found = run(x[:rows])
        compared += rows
        differ += sum(not torch.equal(*pair) for pair in zip(found, alone[:rows], strict=True))
    return compared, differ


def row_of(model: Model, mode: str) -> list[str]:
    name, run, one_by_one = model
    x = torch.randint(3, WORDS, (max(BATCHES), TOKENS), generator=torch.Generator().manual_seed(1))
    cells = []
    with torch.no_grad(), lowprec.torch.batch_invariant(mode) as seen:
        torch.set_num_threads(1)
        alone = torch.cat([run(row) for row in x.split(1)])
        for threads in THREADS:
            torch.set_num_threads(threads)
            for each in filter(None, (run, one_by_one)):
                compared, differ = differing(each, x, alone)
                cells.append(f"{differ} of {compared}")
            if one_by_one is None:
                cells.append("-")
    taken = sum(p.multiplications for p in seen.report().taken)
    total = sum(p.multiplications for p in seen.report().products)
    return [name, mode, *cells, f"{taken / total:.1%}"]


def main() -> None:
    names = sys.argv[1:]
    print("rows that differ from the row alone, in batches of " + ", ".join(map(str, BATCHES)))
    columns = [f"{kind}, {n} threads" for n in THREADS for kind in ("whole", "decoded")]
    print("model", "mode", *columns, "share taken", sep=" | ")
    for model in models():
        for mode in MODES if not names or model[0] in names else ():
            print(*row_of(model, mode), sep=" | ", flush=True)


if __name__ == "__main__":
    main()
