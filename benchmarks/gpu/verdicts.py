"""The report's claims: each a value and its limit, or "not measured"."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import common

Results = Mapping[str, Mapping[str, Any]]

#: Extents of the square products of the claims.
SIZES = (1024, 2048, 4096, 8192, 16384)
#: Kinds of product in the part `speed`.
KINDS = ("bfloat16", "float16", "float32 tf32", "float32 fp32")

#: Limits relative to torch.matmul's speed, without and with autotuning, and relative to its host time.
FLOORS, HOST_LIMIT = {False: 0.98, True: 1.0}, 1.5
CONVERSION_FLOOR = 1.3
#: Relative to torch.matmul's speed in float32, splitting included, for schemes with no larger error.
RECOVERY_FLOORS = {"fp16x3": 2.8, "bf16x6": 1.9}
#: Extents of the products of the last two.
LARGE = 8192


def sizes(kind: str, *, tuned: bool) -> tuple[int, ...]:
    """Return the extents that a claim is about; the largest product in FP32 takes too long to autotune."""
    return SIZES[:-1] if tuned and kind == "float32 fp32" else SIZES


def rows(results: Results, part: str, **where: Any) -> list[Mapping[str, Any]]:
    """Return the rows of a part that have these values."""
    part_rows = results.get(part, {}).get("rows", [])
    return [r for r in part_rows if all(r.get(name) == value for name, value in where.items())]


def claims(results: Results) -> Iterator[dict[str, Any]]:
    for tuned in FLOORS:
        for kind in KINDS:
            yield _speed(results, kind, tuned)
    gain = f"float32 in mode bf16, conversion included, over mode tf32 at {LARGE}"
    bf16 = rows(results, "speed", kind="float32 bf16", n=LARGE, tuned=False)
    tf32 = bf16[0]["speed"].get("lowprec tf32", {}) if bf16 else {}
    yield common.claim(gain, tf32.get("median"), CONVERSION_FLOOR)
    host = "host time of a small product over torch.matmul's, worst type"
    ratios = [r["over_torch"] for r in rows(results, "host", name="lowprec") if r.get("over_torch")]
    yield common.claim(host, max(ratios, default=None), HOST_LIMIT, at_most=True)
    for mode in RECOVERY_FLOORS:
        yield _recovery(results, mode)
    yield from _shares(results)


def _speed(results: Results, kind: str, tuned: bool) -> dict[str, Any]:
    """Return the speed of a kind of product relative to torch.matmul, at its worst size."""
    by_size = {
        str(row["n"]): row["speed"]["torch"]["median"]
        for row in rows(results, "speed", kind=kind, tuned=tuned)
        if row["n"] in sizes(kind, tuned=tuned) and "torch" in row.get("speed", {})
    }
    how = "with" if tuned else "without"
    what = f"{kind.removeprefix('float32 ')}: speed over torch.matmul, worst size, {how} autotuning"
    worst = min(by_size.values(), default=math.inf)
    # One miss is a miss; that the claim is met needs all sizes.
    is_known = len(by_size) == len(sizes(kind, tuned=tuned)) or worst < FLOORS[tuned]
    return common.claim(what, worst if is_known else None, FLOORS[tuned], by_size=by_size)


def _recovery(results: Results, mode: str) -> dict[str, Any]:
    """Return the speed of a scheme over torch's float32, best chunk with no larger error; 0 without such a chunk."""
    # JSON has None for an error that is NaN or infinite.
    errors = {
        (r["name"], r["distribution"]): r["relative_error"]
        for r in rows(results, "splits", n=LARGE)
        if r.get("relative_error") is not None
    }
    baselines = {d: error for (name, d), error in errors.items() if name == "torch float32"}
    speeds: list[float] = []
    for row in rows(results, "splits", n=LARGE, mode=mode, distribution="normal"):
        speed = row.get("speed", {}).get("torch float32")
        if speed and len(baselines) == 2:
            is_exact = all(
                errors.get((row["name"], d), math.inf) <= error for d, error in baselines.items()
            )
            speeds.append(speed["median"] if is_exact else 0.0)
    what = (
        f"{mode}: speed over torch.matmul in float32 at {LARGE}, with no larger error, best chunk"
    )
    return common.claim(what, max(speeds, default=None), RECOVERY_FLOORS[mode])


def _shares(results: Results) -> Iterator[dict[str, Any]]:
    """Yield the claims about every row; the value is the share of the rows for which they hold."""

    def tensor_cores(mode: str) -> list[bool | None]:
        return [
            r.get("tensor_cores")
            for r in rows(results, "accuracy", dtypes=["float32", "float32"], mode=mode)
        ]

    judged = {
        # Tests on the software CUDA show nothing about a GPU.
        "features that work on the GPU, share": [
            r["ok"] for part in results for r in rows(results, part, device="gpu")
        ],
        "errors within the plan's bound, share of products": [
            r["ok"] for r in rows(results, "accuracy")
        ],
        "tf32: algorithms on tensor cores, share": tensor_cores("tf32"),
        "fp32: algorithms without tensor cores, share": [
            None if x is None else not x for x in tensor_cores("fp32")
        ],
    }
    for what, values in judged.items():
        yield common.claim(what, share(values), 1.0, rows=len([x for x in values if x is not None]))


def share(judged: Iterable[bool | None]) -> float | None:
    """Return the share of True among True and False; None without either.

    Examples
    --------
    >>> share([True, False, None]), share([None])
    (0.5, None)
    """
    known = [x for x in judged if x is not None]
    return math.fsum(known) / len(known) if known else None
