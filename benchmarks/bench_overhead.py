"""Time of a call on 8 x 8 arrays, by arguments and stages, against the library's own call; and time of the import.

usage: python benchmarks/bench_overhead.py [--quick] [--output DIR] [--seed N]

The product itself is 1024 flops, so the time is the overhead of the call.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import timeit
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import common
import numpy as np
import timing

import lowprec

SIZE = 8

Row, Names = dict[str, Any], dict[str, Any]

#: Limits of a warm call in microseconds, and of the import beyond NumPy's in seconds.
CALL_LIMITS = {"numpy": 8.0, "torch": 10.0}
VARIANT_LIMITS = {
    **dict.fromkeys(("bias=", "alpha=", "c=, beta="), 12.0),
    **dict.fromkeys(("in tf32", "in bf16", "in fp16"), 15.0),
    "recorded by autograd": 14.0,
}
IMPORT_LIMIT = 0.05

#: Modules that `import lowprec` must not load: frameworks and CUDA libraries.
FRAMEWORKS = ("cuda", "cupy", "jax", "nvmath", "paddle", "tensorflow", "torch")


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
    functions: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {}
    functions["numpy"] = np.asarray, np.matmul
    if importlib.util.find_spec("torch"):
        import torch

        functions["torch"] = torch.from_numpy, torch.matmul
    if importlib.util.find_spec("jax"):
        import jax

        # JAX returns before the result is computed, lowprec after.
        functions["jax"] = jax.numpy.asarray, _wait(jax.numpy.matmul)
    # The code of a user of such arrays without lowprec.
    functions["dlpack"] = OnlyDLPack, lambda x, y: np.matmul(np.from_dlpack(x), np.from_dlpack(y))
    return {name: {"a": make(a), "b": make(b), "own": own} for name, (make, own) in functions.items()}


def _measure(timers: Mapping[Any, tuple[Any, ...]], rounds: int, calls: int, seed: int) -> dict[Any, Row]:
    """Time pairs of statements, lowprec's and the library's own, each pair with its names; return both times by key."""
    statements = {
        (key, function): timeit.Timer(text, globals=names)
        for key, (*texts, names) in timers.items()
        for function, text in zip(("lowprec", "own"), texts, strict=True)
    }
    seconds = timing.repeat(statements, calls=calls, rounds=rounds, seed=seed)
    return {
        key: {function: timing.summary(seconds[key, function]) for function in ("lowprec", "own")}
        | {"speed": timing.speed_ratio(seconds[key, "own"], seconds[key, "lowprec"])}
        for key in timers
    }


def measure_calls(rounds: int, calls: int, seed: int) -> list[Row]:
    """Return one row per library: a warm call of lowprec and of the library itself."""
    timers = {
        name: ("lowprec(a, b)", "own(a, b)", {**names, "lowprec": lowprec.matmul})
        for name, names in libraries(seed).items()
    }
    times = _measure(timers, rounds, calls, seed)
    return [{"measured": "call", "library": name, **row} for name, row in times.items()]


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

        names["jitted"], names["own_jitted"] = (_wait(jax.jit(f)) for f in (lowprec.matmul, jax.numpy.matmul))
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


def measure_variants(rounds: int, calls: int, seed: int, quick: bool) -> list[Row]:
    """Return one row per library and kind of call: times of lowprec and of the library."""
    timers = {}
    for library, names in libraries(seed).items():
        if library == "dlpack":
            continue
        names |= {"lowprec": lowprec.matmul, "bias": names["b"][0], "c": names["b"]}
        with_arguments = {} if library == "jax" else ARGUMENTS
        for variant, texts in {**with_arguments, **_transforms(library, names, quick)}.items():
            timers[library, variant] = (*texts, names)
    times = _measure(timers, rounds, calls, seed)
    return [
        {"measured": "variant", "variant": variant, "library": library, **row}
        for (library, variant), row in times.items()
    ]


# -- stages of a call -----------------------------------------------------------------------------

#: Setup of the statements in `STAGES`, given operands `a` and `b`.
SETUP = """
from lowprec import matmul
from lowprec.arrays import library_of
from lowprec.policy import resolve
from lowprec.core.executors import look_up
from lowprec.core.arguments import PLAIN as plain
library = library_of(a)
x, y = library.view(a), library.view(b)
resolved = resolve(None)
found = look_up(resolved, x, y, plain)
result = library.allocate(found.out_shape, found.out_dtype, x.device, a)
"""

#: Stages in the order of a call.
STAGES = {
    "find the library": "library_of(a)",
    "view both operands": "library.view(a); library.view(b)",
    "resolve the mode": "resolve(None)",
    "look up the plan": "look_up(resolved, x, y, plain)",
    "allocate the result": "library.allocate(found.out_shape, found.out_dtype, x.device, a)",
    "execute": "found.execute(plain.arguments(x, y, result))",
    "hand the result back": "library.wrap(result.owner, a)",
    "all of it": "matmul(a, b)",
}


def measure_stages(rounds: int, calls: int, seed: int) -> list[dict[str, Any]]:
    """Return one row per stage of a call, with the time in each library that lowprec knows by name."""
    names_of = {name: names for name, names in libraries(seed).items() if name in ("numpy", "torch")}
    for names in names_of.values():
        exec(SETUP, names)
    timers = {
        f"{library}: {stage}": timeit.Timer(text, globals=names)
        for library, names in names_of.items()
        for stage, text in STAGES.items()
    }
    seconds = timing.repeat(timers, calls=calls, rounds=rounds, seed=seed)
    return [
        {
            "measured": "station",
            "station": stage,
            "libraries": list(names_of),
            **{library: timing.summary(seconds[f"{library}: {stage}"]) for library in names_of},
        }
        for stage in STAGES
    ]


# -- import ---------------------------------------------------------------------------------------

_IMPORT = """
import sys, time
start = time.perf_counter()
import {module}
seconds = time.perf_counter() - start
import json
print(json.dumps([seconds, list(sys.modules)]))
"""


def measure_import(rounds: int, seed: int) -> dict[str, Any]:
    """Return the time of `import lowprec` beyond `import numpy`, in fresh processes, and the modules it loads."""
    loaded: dict[str, list[str]] = {}

    def sample(module: str, _: int) -> float:
        command = [sys.executable, "-c", _IMPORT.format(module=module)]
        seconds, loaded[module] = json.loads(subprocess.check_output(command, text=True))
        return float(seconds)

    modules = ("numpy", "lowprec")
    for module in modules:
        sample(module, 0)
    seconds = timing.take_turns(modules, sample, rounds=rounds, seed=seed)
    added = [mine - numpy for mine, numpy in zip(seconds["lowprec"], seconds["numpy"], strict=True)]
    return {
        "measured": "import",
        "numpy": timing.summary(seconds["numpy"]),
        "lowprec": timing.summary(seconds["lowprec"]),
        "added": timing.summary(added),
        "frameworks": sorted({*loaded["lowprec"]} & {*FRAMEWORKS}),
    }


# -- command line ---------------------------------------------------------------------------------


def overhead_claims(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    calls = {r["library"]: 1e6 * r["lowprec"]["median"] for r in rows if r["measured"] == "call"}
    others: dict[str, list[float]] = {}
    for r in rows:
        if r["measured"] == "variant":
            others.setdefault(r["variant"], []).append(1e6 * r["lowprec"]["median"])
    imported = next(r for r in rows if r["measured"] == "import")
    limits = {f"call on {SIZE} x {SIZE} float32, {x}, us": (calls.get(x), limit) for x, limit in CALL_LIMITS.items()}
    limits |= {
        f"{variant}, slowest library, us": (max(others[variant]), limit)
        for variant, limit in VARIANT_LIMITS.items()
        if variant in others
    }
    limits["import lowprec over import numpy, s"] = imported["added"]["median"], IMPORT_LIMIT
    limits["frameworks that import lowprec loads"] = len(imported["frameworks"]), 0
    return [common.claim(what, value, limit, at_most=True) for what, (value, limit) in limits.items()]


def main() -> None:
    arguments = common.parser(__doc__).parse_args()
    seed = arguments.seed
    rounds, calls, imports = (3, 20, 2) if arguments.quick else (31, 2000, 25)
    # First, while the process has no spinning threads.
    imported = measure_import(imports, seed)
    rows = [
        *measure_calls(rounds, calls, seed),
        *measure_variants(rounds, calls // 4, seed, arguments.quick),
        *measure_stages(rounds, calls, seed),
        imported,
    ]
    counts = {"size": SIZE, "rounds": rounds, "calls": calls}
    common.report("overhead", arguments, rows, overhead_claims(rows), **counts)


if __name__ == "__main__":
    main()
