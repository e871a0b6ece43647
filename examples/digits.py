"""Train a small network on scikit-learn's handwritten digits in every precision, in NumPy, JAX and PyTorch.

    python examples/digits.py --seeds 20 --out results

One source, written against the Array API, serves every library and every policy: `lowprec.amp.autocast` casts, and
`lowprec.amp.LossScaler` scales. The backward pass is written out, since NumPy has none. `results` gets `digits.json`,
`digits.md` (the table) and `digits.svg`.

Needs scikit-learn, rich and matplotlib; libraries that are not installed are left out.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lowprec import amp

LIBRARIES = {"numpy": "numpy", "jax": "jax.numpy", "torch": "torch"}

#: The loss of the second network is this small, and its learning rate is so much larger: the same training in exact
#: arithmetic, with gradients that are below float16's smallest number.
TINY = 2.0**-24


@dataclass(frozen=True)
class Variant:
    """One line of the table."""

    name: str
    policy: str
    loss_weight: float = 1.0


#: The first of each group is what the others are compared with.
GROUPS = {
    "digits": (
        Variant("FP32 (O0)", "O0"),
        Variant("TF32 (O1)", "O1,compute=tf32"),
        Variant("BF16 (O1)", "O1,compute=bfloat16"),
        Variant(
            "FP16 without scaling", "params=float32,compute=float16,output=float32,loss_scale=1"
        ),
        Variant("FP16 with scaling (O1)", "O1"),
        Variant("FP16 with masters (O2)", "O2"),
        Variant("FP16 alone (O3)", "O3"),
    ),
    "digits, tiny gradients": (
        Variant("tiny: FP32", "O0", TINY),
        Variant(
            "tiny: FP16 without scaling",
            "params=float32,compute=float16,output=float32,loss_scale=1",
            TINY,
        ),
        Variant("tiny: FP16 with scaling", "O1", TINY),
    ),
}


@dataclass(frozen=True)
class Result:
    """One training."""

    library: str
    variant: str
    seed: int
    accuracy: float
    skipped: int
    scale: float
    seconds: float


# -- the network, for any namespace ---------------------------------------------------------------


def start(rng: np.random.Generator, width: int = 32) -> dict[str, np.ndarray[Any, Any]]:
    """Return the weights before training."""
    shapes = {"w1": (64, width), "w2": (width, 10)}
    found = {name: rng.standard_normal(s) * (2 / s[0]) ** 0.5 for name, s in shapes.items()}
    found |= {"b1": np.zeros(width), "b2": np.zeros(10)}
    return {name: x.astype(np.float32) for name, x in found.items()}


def forward(xp: Any, w: Any, x: Any) -> tuple[Any, Any]:
    """Return the hidden layer and the logits."""
    hidden = xp.add(xp.matmul(x, w["w1"]), w["b1"])
    hidden = xp.where(hidden > 0, hidden, xp.zeros_like(hidden))
    return hidden, xp.add(xp.matmul(hidden, w["w2"]), w["b2"])


def gradients(xp: Any, policy: amp.Policy, w: Any, x: Any, y: Any, factor: float) -> Any:
    """Return the gradients of `factor` times the mean cross entropy; `y` holds ones and zeros."""
    hidden, logits = forward(xp, w, policy.cast_inputs(x))
    narrow = logits.dtype
    logits = policy.cast_output(logits)
    e = xp.exp(xp.subtract(logits, xp.max(logits, axis=-1, keepdims=True)))
    probabilities = xp.divide(e, xp.sum(e, axis=-1, keepdims=True))
    # In float32 up to here; the gradient of a cast is a cast.
    by_logits = xp.astype(xp.subtract(probabilities, y) * (factor / x.shape[0]), narrow)
    by_hidden = xp.matmul(by_logits, xp.matrix_transpose(w["w2"]))
    by_hidden = xp.where(hidden > 0, by_hidden, xp.zeros_like(by_hidden))
    x = policy.cast_inputs(x)
    return {
        "w1": xp.matmul(xp.matrix_transpose(x), by_hidden),
        "b1": xp.sum(by_hidden, axis=0),
        "w2": xp.matmul(xp.matrix_transpose(hidden), by_logits),
        "b2": xp.sum(by_logits, axis=0),
    }


def descend(weights: Any, grads: Any, rate: float) -> Any:
    """Return the weights a step further down."""
    return {name: w - rate * grads[name] for name, w in weights.items()}


def train(
    base: Any, variant: Variant, data: Sequence[Any], seed: int, epochs: int, batch: int = 64
) -> tuple[float, int, float]:
    """Return the share of test digits that is recognised, how many steps were skipped, and the last scale."""
    policy = amp.Policy.parse(variant.policy)
    xp = amp.autocast(base, policy)
    rng = np.random.default_rng(seed)
    x, y, test_x, test_y = data
    params = {name: base.asarray(w) for name, w in start(rng).items()}
    has_masters = policy.masters or policy.params == "float32"
    weights = amp.MasterWeights(params, policy) if has_masters else policy.cast_params(params)
    scaler = policy.scaler(growth_interval=200) if has_masters else amp.LossScaler(enabled=False)
    rate, skipped = 0.3 / variant.loss_weight, 0
    for _ in range(epochs):
        order = rng.permutation(len(x))
        for first in range(0, len(x) - batch + 1, batch):
            rows = order[first : first + batch]
            now = weights.params if has_masters else weights
            factor = scaler.scale(variant.loss_weight)
            inputs = base.asarray(x[rows]), base.asarray(y[rows])
            grads = gradients(xp, policy, now, *inputs, factor)
            if not has_masters:
                weights = policy.cast_params(descend(weights, grads, rate))
                continue
            grads = scaler.unscale(weights.widened(grads))
            skipped += scaler.step(weights.update, descend, grads, rate) is None
            scaler.update()
    now = weights.params if has_masters else weights
    logits = forward(xp, now, policy.cast_inputs(base.asarray(test_x)))[1]
    found = np.asarray(policy.cast_output(logits)).argmax(axis=1)
    return float((found == test_y).mean()), skipped, scaler.get_scale()


# -- data, statistics, table ----------------------------------------------------------------------


def digits(seed: int = 0) -> tuple[Any, ...]:
    """Return training digits with their classes as ones and zeros, and test digits with their classes."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = x[order], y[order]
    cut = len(x) * 3 // 4
    return x[:cut], np.eye(10, dtype=np.float32)[y[:cut]], x[cut:], y[cut:]


def equal_means(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the p-value of Welch's test of equal means."""
    from scipy.special import stdtr

    if len(first) < 2 or len({*first, *second}) == 1:
        return 1.0
    shares = [statistics.variance(x) / len(x) for x in (first, second)]
    if not sum(shares):
        return 0.0
    distance = abs(statistics.fmean(first) - statistics.fmean(second)) / sum(shares) ** 0.5
    freedom = sum(shares) ** 2 / sum(
        share**2 / (len(x) - 1) for share, x in zip(shares, (first, second), strict=True)
    )
    return float(2 * stdtr(freedom, -distance))


def summaries(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return a row for each library and variant."""
    rows = []
    for library in dict.fromkeys(r.library for r in results):
        for group in GROUPS.values():
            own = [
                [r for r in results if (r.library, r.variant) == (library, v.name)] for v in group
            ]
            reference = [r.accuracy for r in own[0]]
            for variant, members in zip(group, own, strict=True):
                if not members:
                    continue
                values = [r.accuracy for r in members]
                rows.append(
                    {
                        "library": library,
                        "variant": variant.name,
                        "seeds": len(values),
                        "mean": statistics.fmean(values),
                        "median": statistics.median(values),
                        "std": statistics.stdev(values) if len(values) > 1 else 0.0,
                        "p": None if variant is group[0] else equal_means(reference, values),
                        "skipped": statistics.fmean(r.skipped for r in members),
                    }
                )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows in Markdown."""
    lines = [
        "| library | variant | seeds | mean | median | std. dev. | p (equal means) | skipped steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        p = "-" if r["p"] is None else f"{r['p']:.2g}"
        lines.append(
            f"| {r['library']} | {r['variant']} | {r['seeds']} | {r['mean']:.2%} | {r['median']:.2%} | "
            f"{r['std']:.2%} | {p} | {r['skipped']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw the accuracies, a row for each variant, a panel for each library."""
    from matplotlib.figure import Figure

    libraries = list(dict.fromkeys(r.library for r in results))
    names = [v.name for group in GROUPS.values() for v in group]
    figure = Figure(figsize=(3 + 2.6 * len(libraries), 4.2), layout="constrained")
    panels = figure.subplots(1, len(libraries), sharey=True, squeeze=False)[0]
    for panel, library in zip(panels, libraries, strict=True):
        for place, name in enumerate(reversed(names)):
            values = [
                100 * r.accuracy for r in results if (r.library, r.variant) == (library, name)
            ]
            panel.plot(values, [place] * len(values), "o", alpha=0.4, color="#0072b2")
            if values:
                panel.plot(statistics.fmean(values), place, "|", markersize=16, color="#d55e00")
        panel.set(title=library, xlabel="test accuracy, %")
        panel.set_yticks(range(len(names)), list(reversed(names)))
        panel.grid(axis="x", alpha=0.3)
    figure.savefig(path)


# -- the command ----------------------------------------------------------------------------------


def run(
    libraries: Sequence[str], seeds: int, epochs: int, told: Callable[[Result], None]
) -> list[Result]:
    """Train every variant with every seed."""
    data, results = digits(), []
    for library in libraries:
        base = importlib.import_module(LIBRARIES[library])
        for variant in (v for group in GROUPS.values() for v in group):
            for seed in range(seeds):
                begin = time.perf_counter()
                accuracy, skipped, scale = train(base, variant, data, seed, epochs)
                seconds = time.perf_counter() - begin
                results.append(
                    Result(library, variant.name, seed, accuracy, skipped, scale, seconds)
                )
                told(results[-1])
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and write the results."""
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="DIR")
    given = parser.parse_args(arguments)
    here = [name for name in given.libraries if importlib.util.find_spec(name)]
    count = len(here) * given.seeds * sum(map(len, GROUPS.values()))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with np.errstate(over="ignore", invalid="ignore"), Progress(*columns) as progress:
        task = progress.add_task("training", total=count)

        def told(r: Result) -> None:
            text = f"{r.library}, {r.variant}: {r.accuracy:.1%}"
            progress.update(task, advance=1, description=f"{text:<50}")

        results = run(here, given.seeds, given.epochs, told)
    rows = summaries(results)
    given.out.mkdir(parents=True, exist_ok=True)
    document = {
        "seeds": given.seeds,
        "epochs": given.epochs,
        "summary": rows,
        "results": [asdict(r) for r in results],
    }
    (given.out / "digits.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (given.out / "digits.md").write_text(table(rows), encoding="utf-8")
    draw(results, given.out / "digits.svg")
    Console().print(Markdown(table(rows)))


if __name__ == "__main__":
    main()
