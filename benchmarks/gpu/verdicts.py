"""What the report says about the claims: each a value beside its limit, or "not measured"."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import common

Results = Mapping[str, Mapping[str, Any]]
Row = Mapping[str, Any]

#: Extents of the square products that the claims are about.
SIZES = (1024, 2048, 4096, 8192, 16384)

#: Kinds of product in the part `speed`.
KINDS = ("bfloat16", "float16", "float32 tf32", "float32 fp32")

#: Of torch.matmul's speed: without and with autotuning.
FLOORS = {False: 0.98, True: 1.0}
CONVERSION_FLOOR, CONVERSION_SIZE = 1.3, 8192
HOST_LIMIT = 1.5
#: Of torch.matmul's speed in float32, splitting included, for schemes with no larger error.
RECOVERY_FLOORS, RECOVERY_SIZE = {"fp16x3": 2.8, "bf16x6": 1.9}, 8192


def rows(results: Results, part: str, **where: Any) -> list[Row]:
    """Return the rows of a part that have these values."""
    found = results.get(part, {}).get("rows", [])
    return [r for r in found if all(r.get(name) == value for name, value in where.items())]


def claims(results: Results) -> list[dict[str, Any]]:
    """Return all claims with what was measured."""
    gain = f"float32 in mode bf16, conversion included, over mode tf32 at {CONVERSION_SIZE}"
    bf16 = rows(results, "speed", kind="float32 bf16", n=CONVERSION_SIZE, tuned=False)
    tf32 = bf16[0]["speed"].get("lowprec tf32", {}) if bf16 else {}
    host = "host time of a small product over torch.matmul's, worst type"
    ratios = [r["over_torch"] for r in rows(results, "host", name="lowprec") if r.get("over_torch")]
    return [
        *(_speed(results, kind, tuned) for tuned in FLOORS for kind in KINDS),
        common.claim(gain, tf32.get("median"), CONVERSION_FLOOR),
        common.claim(host, max(ratios, default=None), HOST_LIMIT, at_most=True),
        *(_recovery(results, mode) for mode in RECOVERY_FLOORS),
        *_shares(results),
    ]


def _speed(results: Results, kind: str, tuned: bool) -> dict[str, Any]:
    """Return how fast a kind of product is beside torch.matmul, at the size where it does worst."""
    by_size = {}
    for n in SIZES:
        for row in rows(results, "speed", kind=kind, n=n, tuned=tuned):
            speed = row.get("speed", {}).get("torch")
            if speed:
                by_size[str(n)] = speed["median"]
    how = "with" if tuned else "without"
    what = f"{kind.removeprefix('float32 ')}: speed over torch.matmul, worst size, {how} autotuning"
    complete = set(by_size) == {str(n) for n in SIZES}
    worst = min(by_size.values()) if by_size else None
    # A miss is a miss; that nothing is missed takes all sizes.
    value = worst if complete or (worst is not None and worst < FLOORS[tuned]) else None
    return common.claim(what, value, FLOORS[tuned], by_size=by_size)


def _recovery(results: Results, mode: str) -> dict[str, Any]:
    """Return how fast a scheme is beside torch's float32, best chunk with no larger error; 0 if none has that."""
    errors = {(r["name"], r["distribution"]): r.get("relative_error") for r in rows(results, "splits", n=RECOVERY_SIZE)}
    # JSON has None for an error that is NaN or infinite.
    errors = {key: math.inf if e is None else e for key, e in errors.items()}
    finite = {key: e for key, e in errors.items() if e < math.inf}
    baselines = {d: e for (name, d), e in finite.items() if name == "torch float32"}
    speeds = {}
    for row in rows(results, "splits", n=RECOVERY_SIZE, mode=mode, distribution="normal"):
        speed = row.get("speed", {}).get("torch float32")
        if speed and len(baselines) == 2:
            fine = all(errors.get((row["name"], d), math.inf) <= e for d, e in baselines.items())
            speeds[row["name"]] = speed["median"] if fine else 0.0
    what = f"{mode}: speed over torch.matmul in float32 at {RECOVERY_SIZE}, with no larger error, best chunk"
    return common.claim(what, max(speeds.values(), default=None), RECOVERY_FLOORS[mode])


def _shares(results: Results) -> Iterable[dict[str, Any]]:
    """Return the claims that hold of every row: the value is the share of rows of which they do."""

    def tensor_cores(mode: str) -> list[bool | None]:
        real = rows(results, "accuracy", dtypes=["float32", "float32"], mode=mode)
        return [r.get("tensor_cores") for r in real]

    # What was seen in software says nothing about a GPU.
    shown = [r["ok"] for part in results for r in rows(results, part, device="gpu")]
    judged = {
        "features that work on the GPU, share": shown,
        "errors within the plan's bound, share of products": [r["ok"] for r in rows(results, "accuracy")],
        "tf32: algorithms on tensor cores, share": tensor_cores("tf32"),
        "fp32: algorithms without tensor cores, share": [None if x is None else not x for x in tensor_cores("fp32")],
    }  # fmt: skip
    for what, found in judged.items():
        yield common.claim(what, share(found), 1.0, rows=len([x for x in found if x is not None]))


def share(judged: Iterable[bool | None]) -> float | None:
    """Return the share of True among True and False; None where nothing was judged.

    Examples
    --------
    >>> share([True, False, None]), share([None])
    (0.5, None)
    """
    known = [x for x in judged if x is not None]
    return math.fsum(known) / len(known) if known else None
