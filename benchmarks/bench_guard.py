"""Time to enter and leave a guard, by loaded libraries, compared with threadpoolctl's context manager.

usage: python benchmarks/bench_guard.py [--quick] [--output DIR] [--seed N]

Libraries cannot be unloaded, so the stages are cumulative: no library, PyTorch, PyTorch and JAX.
"""

from __future__ import annotations

import importlib
import importlib.util
import timeit
from collections.abc import Iterator, Sequence
from typing import Any

import common  # isort: skip - sets a variable that must come before NumPy
import timing

import lowprec

#: Upper limits, in seconds, by stage.
LIMITS = {"none": 2e-6, "torch": 15e-6}

#: The timed statements by name; `timers` defines the names in them.
STATEMENTS = {
    "fp32_guard": "with guard: pass",
    "fp32_guard, made anew": "with lowprec.fp32_guard(): pass",
    "fp32_guard inside another": "with guard: pass",
    "fp32_guard(frameworks=False)": "with own: pass",
    "math_mode": "with mode: pass",
    "threadpoolctl, found anew": "with threadpool_limits(1): pass",
    "threadpoolctl, found once": "with found.limit(limits=1): pass",
}


class _Inside(timeit.Timer):
    """Times a statement inside a guard."""

    def timeit(self, number: int = 1) -> float:
        with lowprec.fp32_guard():
            return super().timeit(number)


def timers() -> dict[str, timeit.Timer]:
    """Return the statements; without threadpoolctl only lowprec's."""
    guards = {"guard": lowprec.fp32_guard(), "own": lowprec.fp32_guard(frameworks=False)}
    names: dict[str, Any] = {"lowprec": lowprec, **guards, "mode": lowprec.math_mode("bf16")}
    has_threadpoolctl = importlib.util.find_spec("threadpoolctl") is not None
    if has_threadpoolctl:
        import threadpoolctl

        names["threadpool_limits"] = threadpoolctl.threadpool_limits
        names["found"] = threadpoolctl.ThreadpoolController()
    return {
        name: (_Inside if "inside" in name else timeit.Timer)(text, globals=names)
        for name, text in STATEMENTS.items()
        if has_threadpoolctl or not name.startswith("threadpoolctl")
    }


def guard_claims(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    medians = {r["loaded"]: 1e6 * r["time"]["median"] for r in rows if r["block"] == "fp32_guard"}
    for stage, limit in LIMITS.items():
        what = f"enter and leave fp32_guard, loaded: {stage}, us"
        yield common.claim(what, medians.get(stage), 1e6 * limit, at_most=True)


def main() -> None:
    arguments = common.parser(__doc__).parse_args()
    counts = {"rounds": 3, "calls": 20} if arguments.quick else {"rounds": 31, "calls": 2000}
    rows: list[dict[str, Any]] = []
    for stage in ("none", "torch", "jax"):
        if stage != "none":
            if importlib.util.find_spec(stage) is None:
                continue
            importlib.import_module(stage)
        # Half a millisecond each, and repeated less often than the others.
        seconds = timing.repeat(timers(), seed=arguments.seed, slow=("threadpoolctl, found anew",), **counts)
        rows += [{"loaded": stage, "block": name, "time": timing.summary(s)} for name, s in seconds.items()]
    common.report("guard", arguments, rows, guard_claims(rows), **counts)


if __name__ == "__main__":
    main()
