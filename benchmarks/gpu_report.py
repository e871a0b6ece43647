"""Test and measure everything that requires a GPU, in two runs of less than ten minutes.

usage: python benchmarks/gpu_report.py [--quick] [--parts first|second|A,B] [--out DIR] [--seed N] [--limit SECONDS]
                                       [--part-limit SECONDS] [--commit HASH]

The parts are a first contact, the questions that only a GPU answers, the tests of the CUDA backend that show features,
and the measurements, in the order of their value. Each part runs in its own process for a limited time, so that a crash
or hang affects no other part; only if the first contact multiplies neither in FP32 nor in bf16, nothing else runs. The
report `DIR/gpu-NAME.json` and a log are rewritten after each part; SIGTERM keeps the finished parts, and a second run
keeps the other parts of a report of the same machine, versions and commit.

Compiled kernels are kept in the folder of the variable LOWPREC_CACHE_DIR, if it is set. Without a GPU the tests run on
the software CUDA, the measurements report why they did not run, and the exit status is 0; LOWPREC_TEST_DEVICE=software
runs the measurements that need no PyTorch there, too.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import common  # noqa: E402 - after the path
from claims import CLAIM_HEADER, claim_rows  # noqa: E402
from generated import table, write_text  # noqa: E402
from gpu import arrays, parts, smoke, tests, verdicts  # noqa: E402
from gpu.parts import Result  # noqa: E402


def limits() -> dict[str, float]:
    """Return the seconds of each part, in the order in which they run."""
    return parts.limits(tests.modules())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and print their results; as a child process, run one part."""
    options = _parser().parse_args(arguments)
    if options.child:
        part = parts.Part(options.file)
        part.save()
        if os.environ.get(tests.VARIABLE) == "software":
            arrays.use_software()
        deadline = time.monotonic() + options.limit * parts.GRACE
        parts.runner(options.child)(part, parts.Options(options.quick, options.seed, deadline))
        part.complete = True
        part.save()
        return 0
    begin = time.monotonic()
    # An external time limit ends the report, which keeps the finished parts.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: parts.INTERRUPTED.set())
    with tempfile.TemporaryDirectory(prefix="lowprec-gpu-", ignore_cleanup_errors=True) as folder:
        path, content = run_all(options, Path(folder), begin=begin)
    rows = [
        [name, f"{r['elapsed_s']:.1f}", parts.state(r)[:100]]
        for name, r in content["results"].items()
    ]
    print(f"\n{table(('part', 's', 'state'), rows, words=1)}")
    if not content["machine"]["gpu"]:
        print("\nno GPU was used: the tests ran against the software CUDA")
    print(f"\n{table(CLAIM_HEADER, claim_rows(content['claims']), words=1)}")
    print(f"{time.monotonic() - begin:.0f} s; wrote {path.name} to {path.parent}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = common.parser(__doc__ or "")
    parser.add_argument(
        "--parts",
        type=_names,
        default=[*limits()],
        metavar="A,B",
        help="`first`, `second`, or parts",
    )
    parser.add_argument(
        "--limit", type=float, default=parts.TOTAL_S, metavar="SECONDS", help="for all of it"
    )
    parser.add_argument(
        "--part-limit", type=float, metavar="SECONDS", help="for each part, instead of its own"
    )
    parser.add_argument("--commit", help="of the checkout, where it was copied without its history")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    return parser


def _names(text: str) -> list[str]:
    known = limits()
    runs = {run: parts.run_order(run, tests.modules()) for run in parts.RUNS}
    names = [name for word in text.replace(" ", "").split(",") for name in runs.get(word, [word])]
    if not set(names) <= set(known):
        raise argparse.ArgumentTypeError(
            f"{text!r}: choose of {', '.join([*runs, *known])}, with commas between"
        )
    # The report is named after the machine, which this part describes.
    return list(dict.fromkeys(["device", *names]))


def run_all(
    options: argparse.Namespace,
    folder: Path,
    *,
    begin: float,
    execute: Callable[..., Result] = parts.execute,
) -> tuple[Path, Result]:
    """Run the parts in order, and rewrite the report after each; return its path and the report."""
    results: dict[str, Result] = {}
    earlier: dict[str, Result] = {}
    log = why_not = ""
    for name in options.parts:
        print(f"{time.monotonic() - begin:6.1f} s  {name}", flush=True)
        try:
            left = options.limit - (time.monotonic() - begin)
            limit = min(options.part_limit or limits()[name], left, _left_for_tests(name, results))
            if why_not:
                result = parts.not_run(why_not)
            else:
                result = _run(name, limit, options, folder, results, execute)
        except Exception as error:  # noqa: BLE001 - a part that cannot be started does not end the report
            result = parts.not_run(parts.short(error))
        results[name] = {"question": parts.question(name), **result}
        if name == "smoke":
            why_not = smoke.failure(result)
            print(
                "\n".join(
                    [*smoke.lines(result), *([f"{why_not}. {smoke.ADVICE}"] if why_not else [])]
                )
            )
        print(f"{time.monotonic() - begin:6.1f} s    {parts.state(results[name])}", flush=True)
        part_log = folder / f"{name}.log"
        if part_log.exists():
            log += f"== {name}\n{part_log.read_text(encoding='utf-8', errors='replace')}\n"
        content = _merged(results, options)
        path = options.output / f"gpu-{content['machine']['name']}.json"
        if name == "device":
            earlier, earlier_log = _earlier(path, content)
            log = earlier_log + log
        content = _merged(earlier | results, options)
        common.write_json(path, content)
        write_text(path.with_suffix(".log"), log)
    return path, content


def _left_for_tests(name: str, results: Mapping[str, Result]) -> float:
    """Return the seconds left for the test modules of the first run; the measurements keep their share."""
    if name in (*parts.MEASUREMENTS, *parts.RUNS["second"]):
        return math.inf
    return parts.ALL_TESTS_S - sum(
        r["elapsed_s"] for n, r in results.items() if n not in parts.MEASUREMENTS
    )


def _run(
    name: str,
    limit_s: float,
    options: argparse.Namespace,
    folder: Path,
    results: Mapping[str, Result],
    execute: Callable[..., Result],
) -> Result:
    facts = results.get("device", {}).get("facts", {})
    # If lowprec cannot describe the GPU, the driver's tool and files decide; the parts then show the error.
    has_gpu = any(facts.get(key) for key in ("gpu", "nvidia_smi", "nvidia_files"))
    is_software = os.environ.get(tests.VARIABLE) == "software"
    is_test = name not in parts.MEASUREMENTS
    runs_in_software = is_test or (is_software and name in parts.IN_SOFTWARE)
    if parts.INTERRUPTED.is_set():
        return parts.not_run("the report was interrupted")
    if limit_s < 1:
        return parts.not_run("no time was left")
    if not (runs_in_software or (has_gpu and not is_software) or name == "device"):
        return parts.not_run(facts.get("why_no_gpu") or "no GPU was found")
    path, log = folder / f"{name}.json", folder / f"{name}.log"
    search = [str(HERE.parent), str(HERE), str(HERE.parent / "tests"), os.environ.get("PYTHONPATH")]
    environment = {key: value for key, value in os.environ.items() if key != parts.OVERRIDE} | {
        "PYTHONPATH": os.pathsep.join(filter(None, search)),
        "PYTHONUNBUFFERED": "1",
        "LOWPREC_CACHE_DIR": str(_cache(folder)),
        tests.KERNELS: str(_cache(folder) / "kernels"),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        tests.VARIABLE: "gpu" if has_gpu and not is_software else "software",
    }
    if name == "device":
        del environment[tests.VARIABLE]
    if "-" in name:
        environment[parts.OVERRIDE] = name.partition("-")[2]
    if is_test:
        environment[tests.PATH] = str(path)
        environment[tests.DEADLINE] = str(time.time() + limit_s * parts.GRACE)
        command, reader = tests.command(name, quick=options.quick), tests.read
    else:
        command = [
            sys.executable, str(HERE / "gpu_report.py"), "--child", name, "--file", str(path),
            "--seed", str(options.seed), "--limit", f"{limit_s:.1f}", *(["--quick"] if options.quick else []),
        ]  # fmt: skip
        reader = parts.read
    return execute(command, log, limit_s, environment, functools.partial(reader, path))


def _cache(folder: Path) -> Path:
    """Return a cache for this run: of the caller's only the compiled kernels, so that no earlier choice affects it."""
    cache = folder / "cache"
    kept = os.environ.get("LOWPREC_CACHE_DIR")
    if kept and not cache.exists():
        kernels = Path(kept).expanduser().resolve() / "kernels"
        kernels.mkdir(mode=0o700, parents=True, exist_ok=True)
        cache.mkdir(mode=0o700)
        (cache / "kernels").symlink_to(kernels)
    return cache


def _earlier(path: Path, content: Result) -> tuple[dict[str, Result], str]:
    """Return the parts that ran, and the log, of a report of the same machine, versions and commit at this path."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        log = path.with_suffix(".log").read_text(encoding="utf-8")
        kept = {name: result for name, result in found["results"].items() if not result["not_run"]}
        pairs = [(x["machine"]["gpu"], x["machine"]["versions"], x["machine"]["commit"], x["settings"]["quick"])
                 for x in (found, content)]  # fmt: skip
    except (OSError, ValueError, KeyError):
        return {}, ""
    return (kept, log) if pairs[0] == pairs[1] else ({}, "")


def _merged(results: Mapping[str, Result], options: argparse.Namespace) -> Result:
    """Return the report: results, and the claims about them."""
    machine = {"name": "unknown", "gpu": None, **results.get("device", {}).get("facts", {})}
    machine |= {"date": common.today(), "commit": machine.get("commit") or options.commit}
    try:
        # The software CUDA shows nothing about a GPU.
        claims = list(verdicts.claims(results if machine["gpu"] else {}))
    except Exception as error:  # noqa: BLE001 - the measurements are kept without claims
        claims = []
        machine["claims_error"] = parts.short(error)
    return {
        "benchmark": "gpu",
        "machine": machine,
        "settings": {"quick": options.quick, "seed": options.seed, "limit_s": options.limit},
        "claims": claims,
        "results": dict(results),
    }


if __name__ == "__main__":
    sys.exit(main())
