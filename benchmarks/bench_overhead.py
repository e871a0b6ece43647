"""Time of a call on 8 x 8 arrays against the library's own call, of the import, and of entering and leaving a guard.

usage: python benchmarks/bench_overhead.py [--parts {calls,guard} ...] [--quick] [--output DIR] [--seed N]

The product itself is 1024 flops, so the time is the overhead of the call. The guard is compared with threadpoolctl's
context manager, by loaded libraries; these cannot be unloaded, so its stages are cumulative.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import timeit
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import common
import numpy as np
import threadpoolctl
import timing

import lowprec

SIZE = 8

Row = Names = dict[str, Any]

#: Limits of a warm call in microseconds, and of the import beyond NumPy's in seconds.
CALL_LIMITS = {"numpy": 8.0, "torch": 10.0}
VARIANT_LIMITS = {
    **dict.fromkeys(("bias=", "alpha=", "c=, beta="), 12.0),
    **dict.fromkeys(("in tf32", "in bf16", "in fp16"), 15.0),
    "recorded by autograd": 14.0,
}
IMPORT_LIMIT = 0.05


class OnlyDLPack:
    """An array that supports only DLPack."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **keywords: Any) -> Any:
        return self._array.__dlpack__(**keywords)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


# -- calls ----------------------------------------------------------------------------------------


def _wait(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: function(a, b).block_until_ready()


def libraries(seed: int) -> dict[str, Names]:
    """Return per library two operands `a` and `b`, and its own matmul as `own`."""
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((2, SIZE, SIZE), dtype=np.float32)
    import jax
    import torch

    functions: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
        "numpy": (np.asarray, np.matmul),
        "torch": (torch.from_numpy, torch.matmul),
        # JAX returns before the result is computed, lowprec after.
        "jax": (jax.numpy.asarray, _wait(jax.numpy.matmul)),
        # The code of a user of such arrays without lowprec.
        "dlpack": (OnlyDLPack, lambda x, y: np.matmul(np.from_dlpack(x), np.from_dlpack(y))),
    }
    return {
        name: {"a": make(a), "b": make(b), "own": own} for name, (make, own) in functions.items()
    }


# -- other calls ----------------------------------------------------------------------------------

#: Calls with more than a product, or in another mode: by lowprec, and by the library's own functions.
ARGUMENTS: dict[str, tuple[str, str]] = {
    "bias=": ("lowprec(a, b, bias=bias)", "own(a, b) + bias"),
    "alpha=": ("lowprec(a, b, alpha=0.5)", "0.5 * own(a, b)"),
    "c=, beta=": ("lowprec(a, b, c=c, beta=1.0)", "own(a, b) + c"),
    **{
        f"in {mode}": (f"lowprec(a, b, math_mode={mode!r})", "own(a, b)")
        for mode in ("tf32", "bf16", "fp16", "bf16x3", "fp16x3")
    },
}


def _transforms(library: str, names: dict[str, Any], quick: bool) -> dict[str, tuple[str, str]]:
    """Return the calls inside functions compiled by a library; adds the names they need to `names`."""
    own = names["own"]
    if library == "jax":
        import jax

        names["jitted"], names["own_jitted"] = (
            _wait(jax.jit(f)) for f in (lowprec.matmul, jax.numpy.matmul)
        )
        return {"jitted": ("jitted(a, b)", "own_jitted(a, b)")}
    if library != "torch":
        return {}
    import torch

    names["leaf"] = names["a"].clone().requires_grad_()
    recorded = {"recorded by autograd": ("lowprec(leaf, b)", "own(leaf, b)")}
    if quick:  # the compiler takes seconds
        return recorded
    for name, function in (("compiled", lowprec.matmul), ("own_compiled", own)):
        # One function per call: compiled code is cached by code object.
        call: dict[str, Any] = {"f": function}
        exec("def product(a, b): return f(a, b)", call)
        names[name] = torch.compile(call["product"], fullgraph=True)
    return {
        **recorded,
        "compiled": ("compiled(a, b)", "own_compiled(a, b)"),
        "compiled and recorded": ("compiled(leaf, b)", "own_compiled(leaf, b)"),
    }


def measure_calls(rounds: int, calls: int, seed: int, quick: bool) -> list[Row]:
    """Return one row per library and kind of call: times of lowprec and of the library's own functions."""
    timers: dict[tuple[str, str, str], timeit.Timer] = {}
    for library, names in libraries(seed).items():
        names["lowprec"] = lowprec.matmul
        texts = {"": ("lowprec(a, b)", "own(a, b)")}
        if library != "dlpack":
            names |= {"bias": names["b"][0], "c": names["b"]}
            texts |= ({} if library == "jax" else ARGUMENTS) | _transforms(library, names, quick)
        for variant, (ours, own) in texts.items():
            timers[variant, library, "lowprec"] = timeit.Timer(ours, globals=names)
            timers[variant, library, "own"] = timeit.Timer(own, globals=names)
    seconds = timing.repeat(timers, calls=calls, rounds=rounds, seed=seed)
    rows = []
    for variant, library in dict.fromkeys(key[:2] for key in timers):
        times = {
            name: timing.summary(seconds[variant, library, name]) for name in ("lowprec", "own")
        }
        kind = {"measured": "variant", "variant": variant} if variant else {"measured": "call"}
        rows.append({**kind, "library": library, **times})
    return rows


# -- import ---------------------------------------------------------------------------------------

_IMPORT = (
    "import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
)


def measure_import(rounds: int, seed: int) -> dict[str, Any]:
    """Return the time of `import lowprec` beyond `import numpy`, in fresh processes."""

    def sample(module: str, _: int) -> float:
        return float(
            subprocess.check_output(
                [sys.executable, "-c", _IMPORT.format(module=module)], text=True
            )
        )

    modules = ("numpy", "lowprec")
    for module in modules:
        sample(module, 0)
    seconds = timing.take_turns(modules, sample, rounds=rounds, seed=seed)
    added = [mine - numpy for mine, numpy in zip(seconds["lowprec"], seconds["numpy"], strict=True)]
    times = {"added": timing.summary(added)} | {
        module: timing.summary(seconds[module]) for module in modules
    }
    return {"measured": "import", **times}


def overhead_claims(rows: Sequence[Row]) -> list[Row]:
    def slowest(measured: str, name: str) -> float:
        """Return the microseconds of the slowest call of lowprec in this library, or in this variant."""
        own = [
            r
            for r in rows
            if r["measured"] == measured and name in (r["library"], r.get("variant"))
        ]
        return max(1e6 * r["lowprec"]["median"] for r in own)

    (imported,) = (r["added"]["median"] for r in rows if r["measured"] == "import")
    limits = {
        **{
            f"call on {SIZE} x {SIZE} float32, {x}, us": (slowest("call", x), y)
            for x, y in CALL_LIMITS.items()
        },
        **{
            f"{x}, slowest library, us": (slowest("variant", x), y)
            for x, y in VARIANT_LIMITS.items()
        },
        "import lowprec over import numpy, s": (imported, IMPORT_LIMIT),
    }
    return [
        common.claim(what, value, limit, at_most=True) for what, (value, limit) in limits.items()
    ]


def calls(arguments: argparse.Namespace) -> None:
    rounds, count, imports = (3, 20, 2) if arguments.quick else (31, 1000, 25)
    # First, while the process has no spinning threads.
    imported = measure_import(imports, arguments.seed)
    rows = [*measure_calls(rounds, count, arguments.seed, arguments.quick), imported]
    common.report(
        "overhead", arguments, rows, overhead_claims(rows), size=SIZE, rounds=rounds, calls=count
    )


# -- the guard ------------------------------------------------------------------------------------

#: Upper limits, in microseconds, by stage.
GUARD_LIMITS = {"none": 2.0, "torch": 15.0}

#: The timed statements by name.
BLOCKS = {
    "fp32_guard": "with guard: pass",
    "fp32_guard, a new one": "with lowprec.fp32_guard(): pass",
    "fp32_guard(frameworks=False)": "with own: pass",
    "math_mode": "with mode: pass",
    "threadpoolctl, found once": "with pools.limit(limits=1): pass",
}


def guard_timers() -> dict[str, timeit.Timer]:
    names = {
        "lowprec": lowprec, "guard": lowprec.fp32_guard(), "own": lowprec.fp32_guard(frameworks=False),
        "mode": lowprec.math_mode("bf16"), "pools": threadpoolctl.ThreadpoolController(),
    }  # fmt: skip
    return {name: timeit.Timer(text, globals=names) for name, text in BLOCKS.items()}


def guard_claims(rows: Sequence[Row]) -> Iterator[Row]:
    medians = {r["loaded"]: 1e6 * r["time"]["median"] for r in rows if r["block"] == "fp32_guard"}
    for stage, limit in GUARD_LIMITS.items():
        what = f"enter and leave fp32_guard, loaded: {stage}, us"
        yield common.claim(what, medians.get(stage), limit, at_most=True)


def guard(arguments: argparse.Namespace) -> None:
    counts = {"rounds": 3, "calls": 20} if arguments.quick else {"rounds": 31, "calls": 2000}
    rows: list[Row] = []
    for stage in ("none", "torch", "jax"):
        if stage != "none":
            importlib.import_module(stage)
        seconds = timing.repeat(guard_timers(), seed=arguments.seed, **counts)
        rows += [
            {"loaded": stage, "block": name, "time": timing.summary(s)}
            for name, s in seconds.items()
        ]
    common.report("guard", arguments, rows, guard_claims(rows), **counts)


if __name__ == "__main__":
    # The guard is first: the calls load the libraries.
    common.run_parts(__doc__, {"guard": guard, "calls": calls})
