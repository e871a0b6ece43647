"""Train a small network on scikit-learn's handwritten digits in every precision, in NumPy, JAX and PyTorch.

    python docs/examples/digits.py --seeds 20 --out results

One source, written against the Array API, serves every library and every policy: `lowprec.amp.autocast` casts, and
`lowprec.amp.LossScaler` scales. The backward pass is written out, since NumPy has none. `results` gets
`digits.jsonl` (a line for each training, as soon as it is done: the same command goes on where it was stopped),
`digits.md` (the table) and `digits.svg`.

Needs scikit-learn, rich and matplotlib; libraries that are not installed are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import statistics
import time
from collections.abc import Sequence
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
    policy: amp.Policy
    loss_weight: float = 1.0


_UNSCALED = amp.Policy.preset("O1", loss_scale=1.0)

#: The others of each group are compared with the first.
GROUPS = {
    "digits": (
        Variant("FP32 (O0)", amp.Policy.preset("O0")),
        Variant("TF32 (O1)", amp.Policy.preset("O1", half="tf32")),
        Variant("BF16 (O1)", amp.Policy.preset("O1", half="bfloat16")),
        Variant("FP16 without scaling", _UNSCALED),
        Variant("FP16 with scaling (O1)", amp.Policy.preset("O1")),
        Variant("FP16 with masters (O2)", amp.Policy.preset("O2")),
        Variant("FP16 alone (O3)", amp.Policy.preset("O3")),
    ),
    "digits, tiny gradients": (
        Variant("tiny: FP32", amp.Policy.preset("O0"), TINY),
        Variant("tiny: FP16 without scaling", _UNSCALED, TINY),
        Variant("tiny: FP16 with scaling", amp.Policy.preset("O1"), TINY),
    ),
}


@dataclass(frozen=True)
class Result:
    """One training."""

    library: str
    variant: str
    seed: int
    epochs: int
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
    policy = variant.policy
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
    shares = [statistics.variance(x) / len(x) if len(x) > 1 else 0.0 for x in (first, second)]
    if not sum(shares):
        return float(len({*first, *second}) == 1 or len(first) < 2)
    distance = abs(statistics.fmean(first) - statistics.fmean(second))
    freedom = sum(shares) ** 2 / sum(
        share**2 / (len(x) - 1) for share, x in zip(shares, (first, second), strict=True)
    )
    return two_sided(distance / sum(shares) ** 0.5, freedom)


def equal_pairs(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the p-value of Student's test that the differences of pairs have the mean 0."""
    differences = [x - y for x, y in zip(first, second, strict=True)]
    if len(differences) < 2 or not any(differences):
        return 1.0
    error = statistics.stdev(differences) / len(differences) ** 0.5
    if not error:
        return 0.0
    return two_sided(abs(statistics.fmean(differences)) / error, len(differences) - 1)


def two_sided(t: float, freedom: float) -> float:
    """Return the p-value of a t statistic."""
    from scipy.special import stdtr

    return float(2 * stdtr(freedom, -t))


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values for as many tests at once, by Holm's method: valid however the tests depend on each other."""
    found, largest = list(values), 0.0
    for rank, i in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - rank) * values[i]))
        found[i] = largest
    return found


def summaries(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return a row for each library and variant, with its accuracies by seed."""
    rows: list[dict[str, Any]] = []
    by_row: dict[tuple[str, str], list[Result]] = {}
    for r in sorted(results, key=lambda r: r.seed):
        by_row.setdefault((r.library, r.variant), []).append(r)
    for library in dict.fromkeys(r.library for r in results):
        for group in GROUPS.values():
            reference = [r.accuracy for r in by_row[library, group[0].name]]
            for variant in group:
                members = by_row[library, variant.name]
                values = [r.accuracy for r in members]
                row = {
                    "library": library,
                    "variant": variant.name,
                    "mean": statistics.fmean(values),
                    "median": statistics.median(values),
                    "std": statistics.stdev(values) if len(values) > 1 else 0.0,
                    "skipped": statistics.fmean(r.skipped for r in members),
                    "accuracies": values,
                }
                if variant is not group[0]:
                    row["p"] = equal_means(reference, values)
                    row["p_paired"] = equal_pairs(reference, values)
                rows.append(row)
    compared = [row for row in rows if "p" in row]
    for row, p in zip(compared, holm([row["p_paired"] for row in compared]), strict=True):
        row["p_holm"] = p
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows in Markdown."""
    lines = [
        "| library | variant | mean | median | std. dev. | p, Welch | p, paired | p, Holm | skipped steps |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in rows:
        p = " | ".join(f"{r[key]:.2g}" if key in r else "-" for key in ("p", "p_paired", "p_holm"))
        lines.append(
            f"| {r['library']} | {r['variant']} | {r['mean']:.2%} | {r['median']:.2%} | {r['std']:.2%} | {p} | "
            f"{r['skipped']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[dict[str, Any]]) -> Any:
    """Return a figure of the errors: a row for each variant, a panel for each library, a line at each mean."""
    from matplotlib.figure import Figure

    libraries, names = (list(dict.fromkeys(r[key] for r in rows)) for key in ("library", "variant"))
    figure = Figure(figsize=(7.6, 4.2), layout="constrained")
    panels = figure.subplots(1, len(libraries), sharex=True, sharey=True, squeeze=False)[0]
    for panel, library in zip(panels, libraries, strict=True):
        for r in (r for r in rows if r["library"] == library):
            place = names.index(r["variant"])
            # A training that makes no error is at the edge of the scale.
            errors = [max(100 * (1 - x), 0.1) for x in (*r["accuracies"], r["mean"])]
            style = {"alpha": 0.4, "color": "#0072b2", "markersize": 5}
            panel.plot(errors[:-1], [place] * len(errors[:-1]), "o", **style)
            panel.plot(errors[-1], place, "|", markersize=16, color="#d55e00")
        panel.set(title=library, xscale="log", xlabel="test digits not recognised, %")
        panel.set_xticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
        panel.minorticks_off()
        panel.grid(axis="x")
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    return figure


# -- the command ----------------------------------------------------------------------------------


def done(path: Path) -> dict[tuple[str, str, int, int], Result]:
    """Return the trainings that a file holds; a line that was cut short is none."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            r = Result(**json.loads(line))
            found[r.library, r.variant, r.seed, r.epochs] = r
    return found


def run(libraries: Sequence[str], seeds: int, epochs: int, path: Path) -> list[Result]:
    """Train every variant with every seed, except what the file holds; add each training to the file."""
    from rich import progress

    old, data, results = done(path), digits(), []
    names = [name for name in libraries if importlib.util.find_spec(name)]
    variants = [v for group in GROUPS.values() for v in group]
    wanted = [(name, v, seed) for name in names for v in variants for seed in range(seeds)]
    columns = [progress.TextColumn("{task.description}"), progress.BarColumn()]
    columns += [progress.MofNCompleteColumn(), progress.TimeRemainingColumn()]
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        open(path, "a", encoding="utf-8") as file,
        np.errstate(over="ignore", invalid="ignore"),
        progress.Progress(*columns) as bar,
    ):
        if old:
            bar.print(f"{path.name} holds {len(old)} trainings; remove it to start again")
            file.write("\n")  # ends a line that was cut short
        task = bar.add_task("training", total=len(wanted))
        for name, variant, seed in wanted:
            r = old.get((name, variant.name, seed, epochs))
            if r is None:
                begin = time.perf_counter()
                base = importlib.import_module(LIBRARIES[name])
                found = train(base, variant, data, seed, epochs)
                seconds = round(time.perf_counter() - begin, 3)
                r = Result(name, variant.name, seed, epochs, *found, seconds)
                file.write(json.dumps(asdict(r)) + "\n")
                file.flush()
            results.append(r)
            bar.update(task, advance=1, description=f"{name}, {variant.name}: {r.accuracy:.1%}")
    return results


def options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add what decides which trainings there are."""
    parser.add_argument("--seeds", type=int, default=20, help="trainings of each variant")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and write the results."""
    from rich.console import Console
    from rich.markdown import Markdown

    parser = options(argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]))
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="DIR")
    given = parser.parse_args(arguments)
    results = run(given.libraries, given.seeds, given.epochs, given.out / "digits.jsonl")
    rows = summaries(results)
    (given.out / "digits.md").write_text(table(rows), encoding="utf-8")
    draw(rows).savefig(given.out / "digits.svg")
    Console().print(Markdown(table(rows)))


if __name__ == "__main__":
    main()
