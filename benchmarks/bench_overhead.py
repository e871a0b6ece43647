"""What a call on 8 x 8 arrays costs, against the library's own matmul, station by station; and what the import costs.

usage: python benchmarks/bench_overhead.py [--quick] [--output DIR] [--seed N]

The product itself is 1024 flops, so the time is that of the way there and back.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import common
import numpy as np
import timing

import lowprec

NAME = "overhead"
SIZE = 8

#: Seconds that a warm call may take, and that the import may add to NumPy's.
CALL_LIMITS = {"numpy": 8e-6, "torch": 10e-6}
IMPORT_LIMIT = 0.05

#: Modules that `import lowprec` must not load: frameworks, CUDA libraries, compilers.
FRAMEWORKS = ("cuda", "cupy", "jax", "mkl", "numba", "nvmath", "paddle", "tensorflow", "torch")


class OnlyDLPack:
    """An array that speaks DLPack and nothing else."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **keywords: Any) -> Any:
        """Return the capsule."""
        return self._array.__dlpack__(**keywords)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the device: the CPU."""
        device: tuple[int, int] = self._array.__dlpack_device__()
        return device


# -- calls ----------------------------------------------------------------------------------------


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _wait(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: function(a, b).block_until_ready()


def libraries(seed: int) -> dict[str, tuple[Any, Any, Callable[[Any, Any], Any]]]:
    """Return per library two operands and its own matmul."""
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((2, SIZE, SIZE), dtype=np.float32)
    found: dict[str, tuple[Any, Any, Callable[[Any, Any], Any]]] = {"numpy": (a, b, np.matmul)}
    if _installed("torch"):
        import torch

        found["torch"] = torch.from_numpy(a), torch.from_numpy(b), torch.matmul
    if _installed("jax"):
        import jax

        # JAX returns before the result is there; lowprec's result is there.
        found["jax"] = jax.numpy.asarray(a), jax.numpy.asarray(b), _wait(jax.numpy.matmul)
    # What a user of such arrays would write without lowprec.
    found["dlpack"] = (
        OnlyDLPack(a),
        OnlyDLPack(b),
        lambda x, y: np.matmul(np.from_dlpack(x), np.from_dlpack(y)),
    )
    return found


def _take(
    statements: dict[str, tuple[str, dict[str, Any]]], rounds: int, calls: int, seed: int
) -> dict[str, list[float]]:
    """Time statements in turns; return seconds per execution, by round."""
    timers = {name: timeit.Timer(text, globals=names) for name, (text, names) in statements.items()}

    def sample(name: str, _: int) -> float:
        timers[name].timeit(calls // 10 + 1)
        return timers[name].timeit(calls) / calls

    for name in timers:
        sample(name, 0)
    return timing.take_turns(list(timers), sample, rounds=rounds, seed=seed)


def measure_calls(rounds: int, calls: int, seed: int) -> list[dict[str, Any]]:
    """Return one row per library: a warm call of lowprec and of the library itself."""
    found = libraries(seed)
    statements = {}
    for name, (a, b, own) in found.items():
        names = {"a": a, "b": b, "own": own, "matmul": lowprec.matmul}
        statements[f"lowprec {name}"] = ("matmul(a, b)", names)
        statements[f"own {name}"] = ("own(a, b)", names)
    seconds = _take(statements, rounds, calls, seed)
    return [
        {
            "measured": "call",
            "library": name,
            "lowprec": timing.summary(seconds[f"lowprec {name}"]),
            "own": timing.summary(seconds[f"own {name}"]),
            "speed": timing.speed_ratio(seconds[f"own {name}"], seconds[f"lowprec {name}"]),
        }
        for name in found
    ]


# -- stations of a call ---------------------------------------------------------------------------


#: In the order of the way; the names are those of `stations`.
STATIONS = {
    "find the library": "library_of(a)",
    "view both operands": "library.view(a); library.view(b)",
    "resolve the mode": "resolve(None)",
    "look up the plan": "look_up(resolved, x, y, plain)",
    "allocate the result": "library.allocate(found.out_shape, found.out_dtype, x.device, a)",
    "execute": "found.execute(plain.arguments(x, y, result))",
    "hand the result back": "library.wrap(result.owner, a)",
    "all of it": "matmul(a, b)",
}


def stations(a: Any, b: Any) -> dict[str, Any]:
    """Return what the statements of `STATIONS` need for these operands."""
    from lowprec import policy
    from lowprec.arrays import library_of
    from lowprec.executors import look_up
    from lowprec.request import PLAIN

    library = library_of(a)
    x, y = library.view(a), library.view(b)
    resolved = policy.resolve(None)
    found = look_up(resolved, x, y, PLAIN)
    return {
        "a": a,
        "b": b,
        "found": found,
        "library": library,
        "library_of": library_of,
        "look_up": look_up,
        "matmul": lowprec.matmul,
        "plain": PLAIN,
        "resolve": policy.resolve,
        "resolved": resolved,
        "result": library.allocate(found.out_shape, found.out_dtype, x.device, a),
        "x": x,
        "y": y,
    }


def measure_stations(rounds: int, calls: int, seed: int) -> list[dict[str, Any]]:
    """Return one row per station of a call, with the time in each library that lowprec knows by name."""
    found = {
        name: stations(a, b)
        for name, (a, b, _) in libraries(seed).items()
        if name in ("numpy", "torch")
    }
    statements = {
        f"{library}: {station}": (text, names)
        for library, names in found.items()
        for station, text in STATIONS.items()
    }
    seconds = _take(statements, rounds, calls, seed)
    return [
        {
            "measured": "station",
            "station": station,
            "libraries": list(found),
            **{library: timing.summary(seconds[f"{library}: {station}"]) for library in found},
        }
        for station in STATIONS
    ]


# -- import ---------------------------------------------------------------------------------------

_IMPORT = """
import sys, time
start = time.perf_counter()
import {module}
seconds = time.perf_counter() - start
import json
print(json.dumps([seconds, sorted({{name.partition(".")[0] for name in sys.modules}})]))
"""


def _import(module: str) -> tuple[float, set[str]]:
    command = [sys.executable, "-c", _IMPORT.format(module=module)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, loaded = json.loads(done.stdout)
    return seconds, set(loaded)


def measure_import(rounds: int, seed: int) -> dict[str, Any]:
    """Return what `import lowprec` takes over `import numpy`, each in a fresh process, and what it loads."""
    loaded: dict[str, set[str]] = {}

    def sample(module: str, _: int) -> float:
        seconds, loaded[module] = _import(module)
        return seconds

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
        "frameworks": sorted(loaded["lowprec"].intersection(FRAMEWORKS)),
    }


# -- command line ---------------------------------------------------------------------------------


def overhead_claims(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the limits of a small call and of the import."""
    calls = {r["library"]: r["lowprec"]["median"] for r in rows if r["measured"] == "call"}
    imported = next(r for r in rows if r["measured"] == "import")
    return [
        *(
            common.claim(
                f"call on 8 x 8 float32, {library}, us",
                None if library not in calls else 1e6 * calls[library],
                1e6 * limit,
                at_most=True,
            )
            for library, limit in CALL_LIMITS.items()
        ),
        common.claim(
            "import lowprec over import numpy, s",
            imported["added"]["median"],
            IMPORT_LIMIT,
            at_most=True,
        ),
        common.claim(
            "frameworks that import lowprec loads", len(imported["frameworks"]), 0, at_most=True
        ),
    ]


def main() -> int:
    """Measure, print and write."""
    arguments = common.parser(__doc__).parse_args()
    rounds, calls, imports = (3, 20, 2) if arguments.quick else (31, 2000, 25)
    # First of all: a process without threads that spin.
    imported = measure_import(imports, arguments.seed)
    rows = (
        measure_calls(rounds, calls, arguments.seed)
        + measure_stations(rounds, calls, arguments.seed)
        + [imported]
    )
    settings = {
        "quick": arguments.quick,
        "seed": arguments.seed,
        "size": SIZE,
        "rounds": rounds,
        "calls": calls,
    }
    common.finish(
        common.result_path(arguments.output, NAME),
        common.document(NAME, settings, rows, overhead_claims(rows)),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
