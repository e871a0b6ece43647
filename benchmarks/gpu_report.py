"""Show and measure everything that only a GPU can answer, in one command and within eight minutes.

usage: python benchmarks/gpu_report.py [--quick] [--parts A,B] [--out DIR] [--seed N] [--limit SECONDS]

First the tests of the CUDA backend that show features, then the measurements. Each part runs in a process of its own
with a limit of its own; one that crashes or hangs does not take the others along, and the report `DIR/gpu-NAME.json`
(with a log beside it) is written anew after each. Without a GPU the tests run against the software CUDA, the
measurements say why they did not run, and the exit status is 0 all the same.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import common  # noqa: E402 - after the path
from gpu import parts, reportlog, tests, verdicts  # noqa: E402

NAME = "gpu"

Result = dict[str, Any]
Execute = Callable[..., Result]


def limits() -> dict[str, float]:
    """Return the seconds of each part, in the order in which they run."""
    first, *others = parts.MEASUREMENTS
    seconds = {name: limit for name, (limit, _) in parts.MEASUREMENTS.items()}
    shown = dict.fromkeys(tests.modules(), parts.TESTS_S)
    return {first: seconds[first], **shown, **{name: seconds[name] for name in others}}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and print what they found; as a child, run one part."""
    options = _parser().parse_args(arguments)
    if options.child:
        return measure(options)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lowprec-gpu-") as folder:
        path, content = run_all(options, Path(folder), begin=begin)
    _print(content)
    print(f"{time.monotonic() - begin:.0f} s; wrote {path.name} to {path.parent}")
    return 0


def _parser() -> argparse.ArgumentParser:
    made = common.parser(__doc__ or "")
    made.add_argument(
        "--parts", type=_names, default=[*limits()], metavar="A,B", help="some of them"
    )
    made.add_argument(
        "--limit", type=float, default=parts.TOTAL_S, metavar="SECONDS", help="for all of it"
    )
    made.add_argument("--child", help=argparse.SUPPRESS)
    made.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    return made  # fmt: skip


def _names(text: str) -> list[str]:
    names, known = text.replace(" ", "").split(","), limits()
    if not set(names) <= set(known):
        raise argparse.ArgumentTypeError(
            f"{text!r}: choose of {', '.join(known)}, with commas between"
        )
    # The machine's description is what the others are called after.
    return list(dict.fromkeys(["device", *names]))  # fmt: skip


# -- the parent -----------------------------------------------------------------------------------


def run_all(
    options: argparse.Namespace, folder: Path, *, begin: float, execute: Execute = parts.execute
) -> tuple[Path, Result]:
    """Run parts one after the other, and write the report anew after each; return where it is, and it."""
    results: dict[str, Result] = {}
    log = ""
    for name in options.parts:
        left = options.limit - (time.monotonic() - begin)
        print(f"{time.monotonic() - begin:6.1f} s  {name}", flush=True)
        results[name] = _run(name, min(limits()[name], left), options, folder, results, execute)
        print(f"{time.monotonic() - begin:6.1f} s    {parts.state(results[name])}", flush=True)
        own = folder / f"{name}.log"
        if own.exists():
            log += f"== {name}\n{own.read_text(encoding='utf-8', errors='replace')}\n"
        content = merge(results, options)
        path = options.output / f"{NAME}-{content['machine']['name']}.json"
        common.write_json(path, content)
        common.write_text(path.with_suffix(".log"), log)
    return path, content


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
    # Where the description ended too early, whether the driver answers decides.
    has_gpu = bool(facts.get("gpu", facts.get("nvidia_smi")))
    is_test = name not in parts.MEASUREMENTS
    if limit_s < 1:
        return parts.not_run("no time was left")
    if not (is_test or has_gpu or name == "device"):
        return parts.not_run(facts.get("why_no_gpu") or "no GPU was found")
    path = folder / f"{name}.json"
    environment = environment_of(folder)
    module, _, override = name.partition("-")
    if override:
        environment[parts.OVERRIDE] = override
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
    log = folder / f"{name}.log"
    return execute(command, log, limit_s, environment, functools.partial(reader, path))


def environment_of(folder: Path) -> dict[str, str]:
    """Return the variables of the parts: lowprec from the checkout, caches of their own, no greedy JAX."""
    known = os.environ.get("PYTHONPATH")
    search = os.pathsep.join(filter(None, [str(HERE.parent / "src"), str(HERE), known]))
    return {
        **{name: value for name, value in os.environ.items() if name != parts.OVERRIDE},
        "PYTHONPATH": search,
        "PYTHONUNBUFFERED": "1",
        # What an earlier run has tuned must not show in this one.
        "LOWPREC_CACHE_DIR": str(folder / "cache"),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


def merge(results: Mapping[str, Result], options: argparse.Namespace) -> Result:
    """Return the report: what was found, and what it says about the claims."""
    machine = {"name": "unknown", "gpu": None, **results.get("device", {}).get("facts", {})}
    machine["date"] = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {
        "benchmark": NAME,
        "machine": machine,
        "settings": {"quick": options.quick, "seed": options.seed, "limit_s": options.limit},
        "claims": verdicts.claims(results),
        "results": dict(results),
    }


def _print(content: Mapping[str, Any]) -> None:
    rows = [
        [name, f"{result['elapsed_s']:.1f}", parts.state(result)[:100]]
        for name, result in content["results"].items()
    ]
    common.print_table("parts", ("part", "s", "state"), rows)
    if not content["machine"]["gpu"]:
        print("\nno GPU was used: the tests ran against the software CUDA")
    common.print_table("claims", common.CLAIM_HEADER, common.claim_rows(content["claims"]))


# -- the child ------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> int:
    """Make one measurement in this process."""
    part = parts.Part(options.file)
    part.save()
    deadline = time.monotonic() + options.limit * parts.GRACE
    wishes = parts.Options(options.quick, options.seed, deadline)
    importlib.import_module(f"gpu.{options.child}").run(part, wishes)
    part.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
