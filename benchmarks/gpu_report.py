"""Measure and check everything that only a GPU can answer, in one command and within eight minutes.

usage: python benchmarks/gpu_report.py [--quick] [--sections A,B] [--out DIR] [--seed N] [--limit SECONDS]

Each section runs in a process of its own with a limit of its own; one that crashes or hangs does not take the others
along. The report is `DIR/gpu-NAME.json` (with a log and, where matplotlib is installed, plots beside it). Without a GPU
the sections that need one say so, the others run on the CPU, and the exit status is 0 all the same.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import common  # noqa: E402 - after the path
from gpu import parts, running, sections, verdicts  # noqa: E402

NAME = "gpu"
#: Seconds before its limit at which a section should stop by itself, as a share of the limit.
_GRACE = 0.1

Execute = Callable[..., dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections, merge, print; as a child, run one section."""
    options = _parser().parse_args(arguments)
    if options.child:
        return child(options)
    begin = time.monotonic()
    names = options.sections or list(sections.SECTIONS)
    with tempfile.TemporaryDirectory(prefix="lowprec-gpu-") as folder:
        results = run_all(names, options, Path(folder), begin=begin)
        content = merge(results, options)
        path = options.out / f"{NAME}-{content['machine']['name']}.json"
        common.write_json(path, content)
        _join_logs(Path(folder), names, path.with_suffix(".log"))
    _plot(content, path)
    _print(content)
    print(f"{time.monotonic() - begin:.0f} s; wrote {path.name} to {path.parent}")
    return 0


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    made.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    made.add_argument(
        "--sections", type=_names, metavar="A,B", help=f"of: {', '.join(sections.SECTIONS)}"
    )
    made.add_argument(
        "--out", type=_folder, default=common.RESULTS, metavar="DIR",
        help="folder of the report (default: benchmarks/results, from which docs/verified.md is made)",
    )  # fmt: skip
    made.add_argument("--seed", type=int, default=0)
    made.add_argument(
        "--limit", type=_seconds, default=sections.TOTAL_S, metavar="SECONDS", help="for all of it"
    )
    made.add_argument("--child", help=argparse.SUPPRESS)
    made.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    return made


def _folder(text: str) -> Path:
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no folder")
    return path


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return number


def _names(text: str) -> list[str]:
    names = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [name for name in names if name not in sections.SECTIONS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"{text!r}: choose of {', '.join(sections.SECTIONS)}, with commas between"
        )
    return list(dict.fromkeys(names))


# -- the parent -----------------------------------------------------------------------------------


def run_all(
    names: Sequence[str],
    options: argparse.Namespace,
    folder: Path,
    *,
    begin: float,
    execute: Execute = running.execute,
) -> dict[str, dict[str, Any]]:
    """Run sections one after the other; return their results by name."""
    results = {}
    environment = environment_of(folder)
    for name in names:
        left = options.limit - (time.monotonic() - begin)
        limit = min(sections.SECTIONS[name].limit_s, left)
        print(
            f"{time.monotonic() - begin:6.1f} s  {name}: {sections.SECTIONS[name].what}", flush=True
        )
        if limit < 1:
            results[name] = running.skipped("no time was left")
            continue
        path = folder / f"{name}.json"
        command = [
            sys.executable, str(HERE / "gpu_report.py"), "--child", name, "--part", str(path),
            "--seed", str(options.seed), "--limit", f"{limit:.1f}", *(["--quick"] if options.quick else []),
        ]  # fmt: skip
        results[name] = execute(command, path, folder / f"{name}.log", limit, environment)
        print(f"{time.monotonic() - begin:6.1f} s    {running.state(results[name])}", flush=True)
    return results


def environment_of(folder: Path) -> dict[str, str]:
    """Return the variables of the sections: lowprec from the checkout, caches of their own, no greedy JAX."""
    known = os.environ.get("PYTHONPATH")
    search = os.pathsep.join(filter(None, [str(HERE.parent / "src"), str(HERE), known]))
    return {
        **os.environ,
        "PYTHONPATH": search,
        "PYTHONUNBUFFERED": "1",
        # What an earlier run has tuned must not show in this one.
        "LOWPREC_CACHE_DIR": str(folder / "cache"),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


def merge(results: Mapping[str, dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Return the report: what was found, and what it says about the claims."""
    machine = dict(results.get("device", {}).get("facts", {}))
    machine.setdefault("name", "unknown")
    machine.setdefault("gpu", None)
    machine["date"] = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {
        "benchmark": NAME,
        "machine": machine,
        "settings": {
            "quick": options.quick,
            "seed": options.seed,
            "sections": list(results),
            "limit_s": options.limit,
        },
        "claims": verdicts.claims(results),
        "results": dict(results),
    }


def _join_logs(folder: Path, names: Sequence[str], path: Path) -> None:
    logs = [(name, folder / f"{name}.log") for name in names]
    text = "".join(
        f"== {name}\n{log.read_text(encoding='utf-8', errors='replace')}\n"
        for name, log in logs
        if log.exists()
    )
    common.write_text(path, text)


def _plot(content: Mapping[str, Any], path: Path) -> None:
    """Draw what can be drawn; a report without plots is a report."""
    try:
        from gpu import plots

        plots.write(content, path)
    except Exception:  # noqa: BLE001 - any library's trouble with drawing
        traceback.print_exc()


def _print(content: Mapping[str, Any]) -> None:
    rows = [
        [name, f"{result['elapsed_s']:.1f}", running.state(result)[:100]]
        for name, result in content["results"].items()
    ]
    common.print_table("sections", ("section", "s", "state"), rows)
    if not content["machine"]["gpu"]:
        print(
            "\nno GPU was used: what was measured is the CPU's, and the claims below are about GPUs"
        )
    common.print_table("claims", common.CLAIM_HEADER, common.claim_rows(content["claims"]))


# -- the child ------------------------------------------------------------------------------------


def child(options: argparse.Namespace) -> int:
    """Run one section in this process."""
    import importlib

    from gpu import libraries

    section = sections.SECTIONS[options.child]
    why = libraries.why_no_gpu()
    part = parts.Part(options.part, "cpu" if why else "gpu")
    if section.needs_gpu and why:
        part.unavailable(why)
        return 0
    deadline = time.monotonic() + options.limit * (1 - _GRACE)
    wishes = parts.Options(options.quick, options.seed, deadline)
    part.save()
    importlib.import_module(section.module).run(part, wishes)
    part.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
