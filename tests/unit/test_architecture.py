"""Rules about the source itself that the linters cannot express."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

import lowprec
from lowprec import _version
from support.programs import posix, run_python

PACKAGE = Path(lowprec.__file__).parent
#: Layers above the core, which know no backend.
ABOVE = {"torch", "jax", "dask", "amp", "linalg", "contractions", "profiling", "checking", "cli"}
SOURCES = sorted(PACKAGE.rglob("*.py"))

MAX_FILE_LINES = 424
MAX_FUNCTION_LINES = 60

#: Loaded on demand, if at all: `import lowprec` stays as light as NumPy.
HEAVY = ("cuda", "cupy", "jax", "matplotlib", "nvmath", "rich", "scipy", "tensorflow", "torch")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def function_lengths(source):
    """Yield the name and the lines of each function, its docstring not counted."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, Function):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        first = node.body[0]
        if ast.get_docstring(node, clean=False) is not None:
            lines -= (first.end_lineno or first.lineno) - first.lineno + 1
        yield node.name, lines


def calls_of_property(source):
    """Yield properties of dataclasses with slots that are not decorated functions: Python 3.14 refuses them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and any(
            "slots=True" in ast.unparse(x) for x in node.decorator_list
        ):
            fields = (x for x in node.body if not isinstance(x, Function))
            yield from (text for text in map(ast.unparse, fields) if "property(" in text)


def machine_paths(source):
    """Yield absolute paths in strings and comments, other than those every Linux machine has."""
    path = re.compile(
        r"(?<![\w/.:<\]})*])(?:[A-Z]:\\|/)(?!proc/|sys/|dev/|etc/)[A-Za-z_][\w.-]*/[\w.-]+"
    )
    wanted = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in wanted:
            yield from path.findall(token.string)


def _name(path):
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_source_follows_the_house_rules(path):
    source = path.read_text(encoding="utf-8")
    lines = source.count("\n")
    assert lines <= MAX_FILE_LINES, (
        f"{lines} lines: a file that outgrows {MAX_FILE_LINES} is two ideas"
    )
    long = {n: k for n, k in function_lengths(source) if k > MAX_FUNCTION_LINES}
    assert not long, f"functions over {MAX_FUNCTION_LINES} lines: {long}"
    assert not list(calls_of_property(source))
    assert not list(machine_paths(source)), "a path that exists on one machine only"


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if _name(path).partition("/")[0].removesuffix(".py") in ABOVE],
    ids=_name,
)
def test_no_string_names_a_backend_above_the_core(path):
    """As import-linter sees no import by name."""
    assert not re.search(r"""["']lowprec\.backends""", path.read_text(encoding="utf-8"))


def test_import_is_light():
    loaded = set(
        run_python(
            "import lowprec, sys; print(*{name.partition('.')[0] for name in sys.modules})"
        ).split()
    )
    assert "lowprec" in loaded
    assert not loaded.intersection(HEAVY)


@posix
def test_threads_import_modules_in_one_order():
    """A module waits for its package, so no package that imports it may wait for it meanwhile."""
    code = """
        import ast, os, sys
        import numpy as np
        import lowprec

        class Finder:
            def find_spec(self, name, path=None, target=None):
                frame = sys._getframe()
                while frame := frame.f_back:
                    module = frame.f_locals.get("name", "") if frame.f_code.co_name == "_find_and_load" else ""
                    if module.startswith(f"{name}."):
                        pairs.append((name, module))

        def product():
            with lowprec.emulate("hopper"):
                lowprec.matmul(x, x, math_mode="bf16")
            return lowprec.matmul(x, x, math_mode="bf16")

        def imports_its_own(name):
            tree = ast.parse(open(sys.modules[name].__file__).read())
            return any(
                (node.module or "").startswith(name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
            )

        x, pairs = np.ones((4, 4), np.float32), []
        sys.meta_path.insert(0, Finder())
        for name in ["a product", *lowprec.__all__, "torch", "jax"]:
            if not os.fork():
                product() if name == "a product" else getattr(lowprec, name, None)
                found = {pair for pair in pairs if pair[0].startswith("lowprec.") and imports_its_own(pair[0])}
                print(*sorted(found), end="", flush=True)
                os._exit(0)
            os.wait()
    """
    assert run_python(code, warn="ignore") == ""


def test_version_comes_from_one_place():
    assert lowprec.__version__ == _version.__version__
    citation = (Path(__file__).parents[2] / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {lowprec.__version__}\n" in citation
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", lowprec.__version__)
