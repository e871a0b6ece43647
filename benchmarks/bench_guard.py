"""What it costs to enter and leave a guard, by what is loaded, with threadpoolctl's context manager beside it.

usage: python benchmarks/bench_guard.py [--quick] [--output DIR] [--seed N]

Libraries cannot be unloaded, so the stages come one after the other: no library, then PyTorch, then JAX as well.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import timeit
from collections.abc import Sequence
from typing import Any

import common  # isort: skip - sets a variable that must come before NumPy
import timing

import lowprec

NAME = "guard"

#: Upper limits, in seconds, by stage.
LIMITS = {"none": 2e-6, "torch": 15e-6}
#: What each stage adds.
STAGES = ("none", "torch", "jax")

#: By name: what is timed.
STATEMENTS = {
    "fp32_guard": "with guard: pass",
    "fp32_guard, made anew": "with lowprec.fp32_guard(): pass",
    "fp32_guard inside another": "with guard: pass",
    "fp32_guard(frameworks=False)": "with own: pass",
    "math_mode": "with mode: pass",
    "threadpoolctl, found anew": "with threadpool_limits(1): pass",
    "threadpoolctl, found once": "with found.limit(limits=1): pass",
}


def names() -> dict[str, Any]:
    """Return what the statements need; without threadpoolctl its own are left out."""
    made: dict[str, Any] = {
        "lowprec": lowprec,
        "guard": lowprec.fp32_guard(),
        "own": lowprec.fp32_guard(frameworks=False),
        "mode": lowprec.math_mode("bf16"),
    }
    if importlib.util.find_spec("threadpoolctl") is not None:
        import threadpoolctl

        made["threadpool_limits"] = threadpoolctl.threadpool_limits
        made["found"] = threadpoolctl.ThreadpoolController()
    return made


def measure(stage: str, rounds: int, calls: int, seed: int) -> list[dict[str, Any]]:
    """Return one row per statement: seconds per entry and exit."""
    known = names()
    timers = {
        name: timeit.Timer(text, globals=known)
        for name, text in STATEMENTS.items()
        if "found" in known or not name.startswith("threadpoolctl")
    }

    def sample(name: str, _: int) -> float:
        # Half a millisecond each; it is no use to repeat it as often as the others.
        count = calls // 100 + 1 if name == "threadpoolctl, found anew" else calls
        if name != "fp32_guard inside another":
            timers[name].timeit(count // 10 + 1)
            return timers[name].timeit(count) / count
        with lowprec.fp32_guard():
            timers[name].timeit(count // 10 + 1)
            return timers[name].timeit(count) / count

    seconds = timing.take_turns(list(timers), sample, rounds=rounds, seed=seed)
    return [
        {"measured": "block", "loaded": stage, "block": name, "time": timing.summary(taken)}
        for name, taken in seconds.items()
    ]


def claims(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the limits beside what was measured."""
    found = {r["loaded"]: r["time"]["median"] for r in rows if r["block"] == "fp32_guard"}
    return [
        common.claim(
            f"enter and leave fp32_guard, loaded: {stage}, us",
            1e6 * found[stage] if stage in found else None,
            1e6 * limit,
            at_most=True,
        )
        for stage, limit in LIMITS.items()
    ]


def table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: microseconds by block and stage."""
    stages = list(dict.fromkeys(r["loaded"] for r in rows))
    times = {(r["block"], r["loaded"]): f"{1e6 * r['time']['median']:.2f}" for r in rows}
    blocks = list(dict.fromkeys(r["block"] for r in rows))
    header = ["us", *(f"loaded: {'+ ' if s == 'jax' else ''}{s}" for s in stages)]
    return header, [[block, *(times.get((block, s), "-") for s in stages)] for block in blocks]


def main() -> int:
    """Measure, print and write."""
    arguments = common.parser(__doc__).parse_args()
    rounds, calls = (3, 20) if arguments.quick else (31, 2000)
    rows: list[dict[str, Any]] = []
    for stage in STAGES:
        if stage != "none":
            if importlib.util.find_spec(stage) is None:
                continue
            importlib.import_module(stage)
        rows += measure(stage, rounds, calls, arguments.seed)
    settings = {"quick": arguments.quick, "seed": arguments.seed, "rounds": rounds, "calls": calls}
    common.finish(
        common.result_path(arguments.output, NAME),
        common.document(NAME, settings, rows, claims(rows)),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
