"""Test and measure everything that requires a GPU, in one command and within eight minutes.

usage: python benchmarks/gpu_report.py [--quick] [--parts A,B] [--out DIR] [--seed N] [--limit SECONDS] [--commit HASH]

The parts are the questions that only a GPU answers, in the order of their value, the tests of the CUDA backend that
show features, and the measurements. Each part runs in its own process for at most a minute, so that a crash or hang
affects no other part. The report `DIR/gpu-NAME.json` and a log are rewritten after each part; SIGTERM keeps the
finished parts. Without a GPU the tests run on the software CUDA, the measurements report why they did not run, and the
exit status is 0.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import common  # noqa: E402 - after the path
from gpu import parts, reportlog, tests, verdicts  # noqa: E402

Result = dict[str, Any]
Execute = Callable[..., Result]


def limits() -> dict[str, float]:
    """Return the seconds of each part, in the order in which they run."""
    return parts.limits(tests.modules())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and print their results; as a child process, run one part."""
    options = _parser().parse_args(arguments)
    if options.child:
        return measure(options)
    begin = time.monotonic()
    # An external time limit ends the report, which keeps the finished parts.
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    with tempfile.TemporaryDirectory(prefix="lowprec-gpu-", ignore_cleanup_errors=True) as folder:
        path, content = run_all(options, Path(folder), begin=begin)
    _print(content)
    print(f"{time.monotonic() - begin:.0f} s; wrote {path.name} to {path.parent}")
    return 0


def _interrupt(_number: int, _frame: object) -> None:
    parts.INTERRUPTED.set()


def _parser() -> argparse.ArgumentParser:
    made = common.parser(__doc__ or "")
    names, total = [*limits()], parts.TOTAL_S
    made.add_argument("--parts", type=_names, default=names, metavar="A,B", help="some of them")
    made.add_argument("--limit", type=float, default=total, metavar="SECONDS", help="for all of it")
    made.add_argument("--commit", help="of the checkout, where it was copied without its history")
    made.add_argument("--child", help=argparse.SUPPRESS)
    made.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    return made


def _names(text: str) -> list[str]:
    names, known = text.replace(" ", "").split(","), limits()
    if not set(names) <= set(known):
        choices = ", ".join(known)
        raise argparse.ArgumentTypeError(f"{text!r}: choose of {choices}, with commas between")
    # The report is named after the machine, which this part describes.
    return list(dict.fromkeys(["device", *names]))


# -- the parent -----------------------------------------------------------------------------------


def run_all(
    options: argparse.Namespace, folder: Path, *, begin: float, execute: Execute = parts.execute
) -> tuple[Path, Result]:
    """Run the parts in order, and rewrite the report after each; return its path and the report."""
    results: dict[str, Result] = {}
    log = ""
    for name in options.parts:
        left = options.limit - (time.monotonic() - begin)
        print(f"{time.monotonic() - begin:6.1f} s  {name}", flush=True)
        try:
            limit = min(limits()[name], left, _left_for_tests(name, results))
            found = _run(name, limit, options, folder, results, execute)
        except Exception as error:  # noqa: BLE001 - one part that cannot be started does not end the report
            found = parts.not_run(parts.short(error))
        results[name] = {"question": parts.question(name), **found}
        print(f"{time.monotonic() - begin:6.1f} s    {parts.state(results[name])}", flush=True)
        own = folder / f"{name}.log"
        if own.exists():
            log += f"== {name}\n{own.read_text(encoding='utf-8', errors='replace')}\n"
        content = merge(results, options)
        path = options.output / f"gpu-{content['machine']['name']}.json"
        common.write_json(path, content)
        common.write_text(path.with_suffix(".log"), log)
    return path, content


def _left_for_tests(name: str, results: Mapping[str, Result]) -> float:
    """Return the seconds left for all test modules together; the measurements keep their share."""
    if name in parts.MEASUREMENTS or name == parts.LAST_TESTS:
        return math.inf
    spent = (r["elapsed_s"] for n, r in results.items() if n not in parts.MEASUREMENTS)
    return parts.ALL_TESTS_S - sum(spent)


def _run(
    name: str,
    limit_s: float,
    options: argparse.Namespace,
    folder: Path,
    results: Mapping[str, Result],
    execute: Execute,
) -> Result:
    """Return the result of one part."""
    facts = results.get("device", {}).get("facts", {})
    # If lowprec cannot describe the GPU, the driver's tool and files decide; the parts then show the error.
    has_gpu = any(facts.get(name) for name in ("gpu", "nvidia_smi", "nvidia_files"))
    is_test = name not in parts.MEASUREMENTS
    if parts.INTERRUPTED.is_set():
        return parts.not_run("the report was interrupted")
    if limit_s < 1:
        return parts.not_run("no time was left")
    if not (is_test or has_gpu or name == "device"):
        return parts.not_run(facts.get("why_no_gpu") or "no GPU was found")
    path, log = folder / f"{name}.json", folder / f"{name}.log"
    module, _, override = name.partition("-")
    search = [str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, search)),
        "PYTHONUNBUFFERED": "1",
        # Results tuned by an earlier run must not affect this one.
        "LOWPREC_CACHE_DIR": str(folder / "cache"),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        parts.OVERRIDE: override,
    }
    if not override:
        del environment[parts.OVERRIDE]
    if is_test:
        environment[tests.VARIABLE] = "gpu" if has_gpu else "software"
        environment[reportlog.PATH] = str(path)
        environment[reportlog.DEADLINE] = str(time.time() + limit_s * parts.GRACE)
        command, reader = tests.command(name, quick=options.quick), tests.read
    else:
        command = [
            sys.executable, str(HERE / "gpu_report.py"), "--child", module, "--file", str(path),
            "--seed", str(options.seed), "--limit", f"{limit_s:.1f}", *(["--quick"] if options.quick else []),
        ]  # fmt: skip
        reader = parts.read
    return execute(command, log, limit_s, environment, functools.partial(reader, path))


def merge(results: Mapping[str, Result], options: argparse.Namespace) -> Result:
    """Return the report: results, and the claims about them."""
    found = {"name": "unknown", "gpu": None, **results.get("device", {}).get("facts", {})}
    found["date"] = common.today()
    found["commit"] = found.get("commit") or options.commit
    try:
        claims = verdicts.claims(results)
    except Exception as error:  # noqa: BLE001 - what was measured matters more than what it says
        claims = []
        found["claims_error"] = parts.short(error)
    return {
        "benchmark": "gpu",
        "machine": found,
        "settings": {"quick": options.quick, "seed": options.seed, "limit_s": options.limit},
        "claims": claims,
        "results": dict(results),
    }


def _print(content: Mapping[str, Any]) -> None:
    rows = [
        [name, f"{result['elapsed_s']:.1f}", parts.state(result)[:100]] for name, result in content["results"].items()
    ]
    common.print_table("parts", ("part", "s", "state"), rows)
    if not content["machine"]["gpu"]:
        print("\nno GPU was used: the tests ran against the software CUDA")
    common.print_table("claims", common.CLAIM_HEADER, common.claim_rows(content["claims"]))


# -- the child ------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> int:
    """Make one measurement in this process."""
    part = parts.opened(options.file)
    part.save()
    deadline = time.monotonic() + options.limit * parts.GRACE
    wishes = parts.Options(options.quick, options.seed, deadline)
    importlib.import_module(f"gpu.{options.child}").run(part, wishes)
    part.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
