"""A mistake of the user is one line on standard error and exit code 2."""

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _somewhere(tmp_path, monkeypatch, files):
    """Work in a folder with A.npy (24, 40), B.npy (40, 16) and some that do not go with them."""
    monkeypatch.chdir(tmp_path)
    np.save("wrong.npy", np.ones((7, 5), np.float32))
    np.save("objects.npy", np.array([None]), allow_pickle=True)
    np.save("int64.npy", np.ones((40, 16), np.int64))
    np.save("float64.npy", np.ones((40, 16)))
    np.save("scalar.npy", np.float32(1))
    Path("text.npy").write_text("1.0, 2.0\n")
    Path("folder").mkdir()


PRODUCT = ("plan", "A.npy", "B.npy")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("chek",), "invalid choice: 'chek'; did you mean 'check'?"),
        (("check", "--distribution", "wid"), "invalid choice: 'wid'; did you mean 'wide'?"),
        ((*PRODUCT, "--mode", "ft32"), "did you mean 'tf32'?"),
        (("check", "--modes", "tf32,bf61"), "did you mean 'bf16'?"),
        ((*PRODUCT, "--dtype", "bflaot16"), "did you mean 'bfloat16'?"),
        (
            ("info", "--verbose"),
            "info: unrecognized arguments: --verbose (see lowprec info --help)",
        ),
        (
            ("run", "--mode", "bf16", "--intercpt", "A.npy"),
            "--intercpt; did you mean '--intercept'? (see lowprec run",
        ),
        (("check", "--size=8"), "unrecognized arguments: --size=8; did you mean '--sizes'?"),
        (("--versoin",), "did you mean '--version'?"),
        ((*PRODUCT, "--mode", "fp4"), "did you mean 'nvfp4'?"),
        ((*PRODUCT, "--dtype", "half"), "did you mean 'float16'?"),
        ((*PRODUCT, "--bound", "likely"), "invalid choice: 'likely'"),
        ((*PRODUCT, "--bound", "probable"), "needs rtol=; pass both"),
        ((*PRODUCT, "--k-chunk", "0"), "is not a whole number of at least 1"),
        ((*PRODUCT, "--rtol", "tight"), "invalid float value: 'tight'"),
        ((*PRODUCT, "--rtol", "-1"), "rtol must be a positive finite number"),
        ((*PRODUCT, "--rtol", "1e-30"), "no math mode guarantees rtol"),
        ((*PRODUCT, "--rtol", "1e-2", "--mode", "tf32"), "exclude each other"),
        ((*PRODUCT, "--out-dtype", "int8"), "out_dtype int8 is not supported"),
        ((*PRODUCT, "--device", "h20"), "choose one of: cpu, v100"),
        ((*PRODUCT, "--device", "h20"), "did you mean 'h200'?"),
        (("plan",), "give two .npy files, or --shapes"),
        (("plan", "A.npy"), "give two .npy files, or --shapes"),
        (("plan", "A.npy", "B.npy", "--shapes", "2x2", "2x2"), "not both"),
        (("plan", "--shapes", "2x2"), "expected 2 arguments"),
        (("plan", "--shapes", "2x", "2x2"), "'2x' is not a shape"),
        (("plan", "--shapes", "-2x2", "2x2"), "lowprec: plan"),
        (("plan", "--shapes", "2x3", "2x3"), "(2, 3) and (2, 3)"),
        (("check", "A.npy"), "give two .npy files, or none"),
        (("check", "A.npy", "B.npy", "--sizes", "8"), "--sizes is for random operands"),
        (("check", "A.npy", "B.npy", "--distribution", "wide"), "--distribution is for random"),
        (("check", "--sizes", "0"), "'0' is not one extent (1024) or three"),
        (("check", "--sizes", "8x8"), "is not one extent (1024) or three"),
        (("check", "--rounds", "0"), "'0' is not a whole number of at least 1"),
        (("check", "--budget", "soon"), "'soon' is not a number of seconds"),
        (("check", "--seed", "x"), "'x' is not a whole number"),
        (("check", "--dtype", "float64"), "products of float64 have no wider reference"),
        (("check", "float64.npy", "float64.npy"), "check the operands rounded to float32"),
        (("check", "--sizes", "99999999999"), "not enough memory: "),
        (("check", "--sizes", "9" * 5000), "is too large"),
        (("plan", "--shapes", "2x" + "9" * 30, "2x2"), "is too large"),
        (("check", "--seed", "9" * 5000), "is too large"),
    ],
)
def test_words(refused, words, says):
    assert says in refused(*words)


def test_no_words_at_all(command):
    code, out, err = command()
    assert (code, out) == (2, "")
    assert command("--help").out == err


@pytest.mark.parametrize("name", ["plan", "check"])
@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        ("missing.npy", "B.npy", "cannot read missing.npy: No such file or directory"),
        ("A.npy", "folder", "cannot read folder: Is a directory"),
        ("A.npy", "", "cannot read '': No such file or directory"),
        ("text.npy", "B.npy", "cannot read text.npy as an .npy file"),
        ("A.npy", "objects.npy", "cannot read objects.npy"),
        ("A.npy", "wrong.npy", "(24, 40) and (7, 5)"),
        ("A.npy", "scalar.npy", "(24, 40) and ()"),
        ("A.npy", "int64.npy", "int64"),
    ],
)
def test_operands(refused, name, a, b, says):
    assert says in refused(name, a, b)


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("folder", "cannot write folder: it is a folder"),
        ("", "cannot write '': the name is empty"),
        ("missing/C.csv", "does not exist"),
        ("A.npy/C.csv", "does not exist"),
    ],
)
def test_output(refused, monkeypatch, output, says):
    # Refused before the operands are even read.
    monkeypatch.setattr(np.lib.format, "read_array", None)
    assert says in refused("check", "A.npy", "B.npy", "--csv", output)


@pytest.mark.parametrize("variable", ["LOWPREC_MATH_MODE", "LOWPREC_FORCE_MATH_MODE"])
@pytest.mark.parametrize("words", [PRODUCT, ("check", "A.npy", "B.npy")])
def test_environment_variable(refused, monkeypatch, variable, words):
    monkeypatch.setenv(variable, "fp17")
    message = refused(*words)
    assert variable in message
    assert "'fp17'" in message
    assert "fp32, fp32_pedantic, fp64, tf32" in message
