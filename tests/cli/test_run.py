"""`lowprec run`: a program under a mode or the guard is otherwise what `python PROGRAM` is.

Every case runs twice, by Python and by `lowprec run`, and both must say the same on both streams and
end in the same way. What the programs print shows what they can see of how they were started.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lowprec.cli import launcher
from lowprec.cli.commands import run
from lowprec.cli.parser import parse

MODE = ("--mode", "bf16")
GUARD = ("--guard",)

Done = subprocess.CompletedProcess[str]

#: What a program can see of how it was started.
SEEN = """
import json, sys
seen = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path,
    "flags": str(sys.flags),
    "xoptions": sys._xoptions,
    "warnoptions": sys.warnoptions,
    "unbuffered": sys.stdout.write_through,
    "names": sorted(k for k in globals() if k != "seen"),
    "file": globals().get("__file__"),
    "spec": getattr(__spec__, "name", None),
    "package": __package__,
    "name": __name__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "numpy": "numpy" in sys.modules,
}
print(json.dumps(seen, indent=1))
"""


def _python(
    words: Sequence[object],
    *,
    options: Sequence[str] = (),
    cwd: Path,
    stdin: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> Done:
    return subprocess.run(
        [sys.executable, *options, *map(str, words)],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        # Warnings as errors would be told by lowprec's process, too.
        env={**os.environ, "PYTHONUNBUFFERED": "", **(variables or {})},
        timeout=120,
    )


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Write a file of the program's folder."""

    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
        return path

    return write_file


@pytest.fixture
def under(tmp_path: Path) -> Callable[..., Done]:
    """Run a program by `lowprec run`."""

    def run_program(how: Sequence[str], *words: object, **more: Any) -> Done:
        return _python(["-m", "lowprec", "run", *how, *words], cwd=tmp_path, **more)

    return run_program


@pytest.fixture
def same(tmp_path: Path, under: Callable[..., Done]) -> Callable[..., Done]:
    """Run a program by Python and by `lowprec run`; there must be no difference."""

    def compare(*words: object, how: Sequence[str] = MODE, **more: Any) -> Done:
        plain = _python(words, cwd=tmp_path, **more)
        done = under(how, *words, **more)
        assert (done.stdout, done.stderr) == (plain.stdout, plain.stderr)
        assert done.returncode == plain.returncode
        return done

    return compare


Write = Callable[[str, str], Path]
Same = Callable[..., Done]


# -- as if run by Python --------------------------------------------------------------------------


@pytest.mark.parametrize("how", [MODE, GUARD], ids=" ".join)
def test_a_script_sees_what_it_would_see(write: Write, same: Same, how: Sequence[str]) -> None:
    write("folder/script.py", SEEN)
    done = same("folder/script.py", "a b", "--help", "--mode", "x", "-m", "--", "", how=how)
    seen = json.loads(done.stdout)
    assert seen["argv"][1:] == ["a b", "--help", "--mode", "x", "-m", "--", ""]
    assert seen["path"][0].endswith("folder")
    assert not seen["numpy"]


@pytest.mark.parametrize(
    "words",
    [("-m", "package.module", "-h"), ("-mpackage", "x"), ("-c", SEEN, "-x"), ("--", "script.py")],
    ids=["module", "package", "code", "dashes"],
)
def test_other_programs_see_what_they_would_see(
    write: Write, same: Same, words: Sequence[str]
) -> None:
    for name in ("package/__init__.py", "package/module.py", "package/__main__.py", "script.py"):
        write(name, SEEN)
    assert same(*words).returncode == 0


def test_a_folder_and_a_zip_file(write: Write, same: Same, tmp_path: Path) -> None:
    write("app/__main__.py", f"import beside\n{SEEN}")
    write("app/beside.py", "print(__file__)")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        for name in ("__main__.py", "beside.py"):
            archive.write(tmp_path / "app" / name, name)
    assert same("app", "x").returncode == 0
    assert same("app.zip", "x").returncode == 0


def test_standard_input_as_program_and_as_data(write: Write, same: Same) -> None:
    assert '"-"' in same("-", "x", stdin=SEEN).stdout
    write("script.py", "import sys\nprint(input(), sys.stdin.read(), sys.stdin.isatty())")
    assert same("script.py", stdin="one\ntwo\nthree").stdout == "one two\nthree False\n"


def test_pythons_own_options_reach_the_program(write: Write, tmp_path: Path) -> None:
    write("script.py", SEEN)
    options = ["-OuX", "utf8=0", "-W", "ignore::ResourceWarning", "-B", "-P"]
    options = [o for o in options if o != "-P" or sys.version_info >= (3, 11)]
    plain = _python(["script.py"], options=options, cwd=tmp_path)
    done = _python(["-m", "lowprec", "run", *MODE, "script.py"], options=options, cwd=tmp_path)
    assert done.stderr == plain.stderr == ""
    found, expected = json.loads(done.stdout), json.loads(plain.stdout)
    # The same options, in words of their own.
    assert found.pop("orig_argv")[-1] == expected.pop("orig_argv")[-1] == "script.py"
    assert found == expected
    assert found["unbuffered"]


@pytest.mark.parametrize(
    "body",
    [
        "sys.exit(3)",
        "sys.exit('said on the way out')",
        "sys.exit()",
        "sys.exit(['a', 'list'])",
        "print('lost without a flush', end=''); sys.stdout.flush(); os._exit(4)",
        "os.abort() if not hasattr(os, 'kill') else os.kill(os.getpid(), signal.SIGTERM)",
        "signal.raise_signal(signal.SIGINT); time.sleep(60)",
        "atexit.register(print, 'at exit'); raise SystemExit(5)",
        "threading.Thread(target=lambda: (time.sleep(0.2), print('outlived'))).start()",
        "threading.Thread(target=lambda: 1 / 0, name='worker').start()",
        "sys.excepthook = lambda *error: print('hook', error[0], error[2].tb_next); 1 / 0",
        "warnings.warn('from the script')",
    ],
)
def test_ends(write: Write, same: Same, body: str) -> None:
    imports = "import atexit, os, signal, sys, threading, time, warnings"
    write("script.py", f"{imports}\nprint('begun')\n{body}\n")
    same("script.py")


def test_a_traceback_is_the_programs(write: Write, same: Same) -> None:
    write("beside.py", "def divide(x):\n    return 1 / x\n")
    text = """
        import beside

        def solve():
            try:
                beside.divide(0)
            except ZeroDivisionError as error:
                raise ValueError("no solution") from error

        if __name__ == "__main__":
            solve()
        """
    write("script.py", text)
    for words in (["script.py"], ["-m", "script"]):
        done = same(*words)
        assert done.returncode == 1
        assert "ValueError: no solution" in done.stderr
        assert "lowprec" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("wrong.py",),
        ("-m", "wrong"),
        ("missing.py",),
        ("-m", "missing"),
        ("empty",),
        ("-m", "empty"),
    ],
    ids=" ".join,
)
def test_programs_that_cannot_run(
    write: Write, same: Same, tmp_path: Path, words: Sequence[str]
) -> None:
    write("wrong.py", "def f(:\n    pass\n")
    (tmp_path / "empty").mkdir()
    done = same(*words)
    assert done.returncode in (1, 2)
    assert done.stderr


def test_arguments_of_argparse(write: Write, same: Same) -> None:
    text = """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--mode", choices=["fast", "slow"])
        parser.add_argument("--guard", action="store_true")
        print(parser.parse_args())
        """
    write("script.py", text)
    assert "usage: script.py" in same("script.py", "--help").stdout
    assert "mode='fast', guard=True" in same("script.py", "--guard", "--mode", "fast").stdout
    assert same("script.py", "--mode", "none").returncode == 2


def test_resources_and_pickles(write: Write, same: Same) -> None:
    text = """
        import pathlib, pickle

        class Thing:
            def __eq__(self, other):
                return type(self) is type(other)

        print(pathlib.Path(__file__).with_name("data.txt").read_text())
        data = pickle.dumps(Thing())
        print(data, pickle.loads(data) == Thing(), Thing.__module__)
        """
    write("folder/script.py", text)
    write("folder/data.txt", "found")
    assert same("folder/script.py").stdout.startswith("found\n")


SPAWN = """
    import multiprocessing as mp
    import sys

    class Thing:
        def __init__(self, x):
            self.x = x

    def work(thing):
        return Thing(thing.x ** 2)

    if __name__ == "__main__":
        with mp.get_context(sys.argv[1]).Pool(2) as pool:
            print([t.x for t in pool.map(work, map(Thing, range(4)))])
    """


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_multiprocessing(write: Write, same: Same, method: str) -> None:
    if sys.platform == "win32" and method != "spawn":
        pytest.skip("Windows has no fork")
    write("script.py", SPAWN)
    assert same("script.py", method).stdout == "[0, 1, 4, 9]\n"
    assert same("-m", "script", method).stdout == "[0, 1, 4, 9]\n"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no POSIX signals")
def test_ctrl_c_from_outside(write: Write, tmp_path: Path) -> None:
    write("script.py", "import time\nprint('ready', flush=True)\ntime.sleep(60)")
    ends = []
    for words in (["script.py"], ["-m", "lowprec", "run", *GUARD, "script.py"]):
        with subprocess.Popen(
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            ends.append((process.communicate(timeout=60), process.returncode))
    assert ends[0] == ends[1]
    assert ends[1][1] == -signal.SIGINT


def test_the_users_own_sitecustomize_runs(write: Write, same: Same, tmp_path: Path) -> None:
    write("site/sitecustomize.py", "print('mine', __name__, __file__)")
    write("script.py", f"import sitecustomize\nprint(sitecustomize.__file__)\n{SEEN}")
    done = same("script.py", variables={"PYTHONPATH": str(tmp_path / "site")})
    assert done.stdout.count("mine sitecustomize") == 1


@pytest.mark.parametrize("body", ["1 / 0", "import missing_module"])
def test_a_broken_sitecustomize_is_told_as_ever(
    write: Write, tmp_path: Path, under: Callable[..., Done], body: str
) -> None:
    write("site/sitecustomize.py", body)
    write("script.py", "print('ran')")
    variables = {"PYTHONPATH": str(tmp_path / "site")}
    plain = _python(["script.py"], cwd=tmp_path, variables=variables)
    done = under(MODE, "script.py", variables=variables)
    assert "Error in sitecustomize" in plain.stderr
    # Told twice: lowprec's own process has it, too.
    assert (done.stdout, done.stderr) == ("ran\n", plain.stderr * 2)


# -- the mode -------------------------------------------------------------------------------------

#: Prints the mode in force in the main thread, in another one, in a spawned process and in a subprocess.
EVERYWHERE = """
    import multiprocessing as mp
    import subprocess
    import sys
    import threading

    import lowprec

    shape = lowprec.ShapeDtype((8, 8), "float32")

    def show(*_):
        asked = lowprec.plan(shape, shape, math_mode="fp16").mode
        with lowprec.math_mode("tf32"):
            print(lowprec.get_math_mode(), end=" ")
        print(asked, end=" ")
        lowprec.set_math_mode(None)
        print(lowprec.get_math_mode(), flush=True)

    if __name__ == "__main__":
        show()
        thread = threading.Thread(target=show)
        thread.start()
        thread.join()
        with mp.get_context("spawn").Pool(1) as pool:
            pool.map(show, [0])
        code = "import lowprec; print('- -', lowprec.get_math_mode())"
        subprocess.run([sys.executable, "-c", code], check=True)
    """


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (("--mode", "bf16"), ("tf32 fp16 bf16", "bf16")),
        (("--mode=BF16",), ("tf32 fp16 bf16", "bf16")),
        (("--mode", "bf16", "--force"), ("bf16 bf16 bf16", "bf16")),
        (("--guard",), ("fp32 fp32 fp32", "fp32")),
    ],
    ids=" ".join,
)
def test_the_mode_is_in_force_everywhere(
    write: Write,
    under: Callable[..., Done],
    how: Sequence[str],
    expected: tuple[str, str],
) -> None:
    write("script.py", EVERYWHERE)
    done = under(how, "script.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [expected[0]] * 3 + [f"- - {expected[1]}"]


PRINT_MODE = ("-c", "import lowprec; print(lowprec.get_math_mode())")


@pytest.mark.parametrize(
    ("how", "variables", "mode"),
    [
        (MODE, {"LOWPREC_MATH_MODE": "fp16"}, "bf16"),
        (MODE, {"LOWPREC_FORCE_MATH_MODE": "fp16"}, "fp16"),
        ((*MODE, "--force"), {"LOWPREC_FORCE_MATH_MODE": "fp16"}, "bf16"),
        (GUARD, {"LOWPREC_FORCE_MATH_MODE": "fp16"}, "fp32"),
        (GUARD, {"LOWPREC_FORCE_MATH_MODE": "fp32_pedantic"}, "fp32_pedantic"),
        (("--mode", "tf32"), {"NVIDIA_TF32_OVERRIDE": "0"}, "fp32"),
    ],
)
def test_beside_the_users_variables(
    under: Callable[..., Done], how: Sequence[str], variables: Mapping[str, str], mode: str
) -> None:
    assert under(how, *PRINT_MODE, variables=variables).stdout == f"{mode}\n"


def test_one_inside_the_other(under: Callable[..., Done], tmp_path: Path) -> None:
    inner = ("-m", "lowprec", "run", *MODE, *PRINT_MODE)
    assert under(("--mode", "fp16"), *inner).stdout == "bf16\n"
    assert under(GUARD, *inner).stdout == "fp32\n"
    code = "import os; print(os.environ['PYTHONPATH'])"
    variables = {"PYTHONPATH": str(tmp_path)}
    done = under(GUARD, "-m", "lowprec", "run", *GUARD, "-c", code, variables=variables)
    assert done.stdout == f"{launcher.STARTUP}{os.pathsep}{tmp_path}\n"


# -- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["script.py"], "run: one of the arguments --mode --guard is required"),
        (["--mode", "tf23", "script.py"], "run: argument --mode: mode 'tf23' is not a math mode"),
        (["--mode"], "run: argument --mode: expected one argument"),
        (["--mode", "tf32", "--guard", "x.py"], "run: argument --guard: not allowed with argument"),
        (["--guard", "--force", "x.py"], "run: --force goes with --mode"),
        (["--guard", "-u", "x.py"], "unrecognized arguments: -u"),
        (["--guard"], "run: which program?"),
        (["--guard", "--"], "run: which program?"),
        (["--guard", "-m"], "run: which program?"),
    ],
)
def test_mistakes(refused: Callable[..., str], words: Sequence[str], message: str) -> None:
    assert message in refused("run", *words)


def test_a_bad_variable_is_refused(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWPREC_FORCE_MATH_MODE", "fp17")
    for how in (MODE, GUARD):
        assert "LOWPREC_FORCE_MATH_MODE" in refused("run", *how, "script.py")


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_an_interpreter_that_ignores_us_is_refused(tmp_path: Path, option: str) -> None:
    # Without site-packages (-S) lowprec would not be found either.
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from lowprec.cli import main; sys.exit(main(['run', '--guard', 'script.py']))"
    )
    done = _python(["-c", code], options=[option], cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("lowprec: run: with Python's options -E, -I or -S")


def test_a_python_that_does_not_start(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert "cannot start" in refused("run", "--guard", "script.py")
    monkeypatch.setattr(sys, "executable", "")
    assert "sys.executable is empty" in refused("run", "--guard", "script.py")


@pytest.mark.parametrize(
    ("words", "own"),
    [
        (["--mode", "tf32", "x.py", "--help"], 2),
        (["--mode=tf32", "--force", "-mmodule", "--guard"], 2),
        (["--guard", "--", "-x.py"], 1),
        (["--guard", "-", "x"], 1),
        (["--help"], 1),
        (["--mode"], 1),
        ([], 0),
    ],
)
def test_where_the_program_begins(words: list[str], own: int) -> None:
    assert run.split(words) == (words[:own], words[own:])


def test_other_commands_have_no_program() -> None:
    assert parse(["info"]).program == []
    assert parse(["run", "--guard", "x.py", "run"]).program == ["x.py", "run"]
