"""Rules: each spelling gives the same pairs, and illegal ones are refused with the part that is wrong."""

import sys

import pytest

import lowprec
from lowprec.core.rules import first_match, names, parse_rules, shown
from lowprec.modes import MathMode

RULES = (("head", MathMode.FP32), ("*", MathMode.NVFP4))


def test_every_spelling_gives_the_same_rules(tmp_path):
    given = [
        "head=fp32,*=nvfp4",
        " head = FP32 , * = NVFP4 ",
        {"head": "fp32", "*": MathMode.NVFP4},
        [("head", "fp32"), ["*", "nvfp4"]],
        (("head", "fp32"), ("*", lowprec.Recipe("nvfp4"))),
    ]
    if sys.version_info >= (3, 11):
        path = tmp_path / "modes.toml"
        path.write_text('[rules]\nhead = "fp32"\n"*" = "nvfp4"\n')
        given += [path, str(path)]
    assert [parse_rules(rules) for rules in given] == [RULES] * len(given)
    assert shown(RULES) == "{'head': 'fp32', '*': 'nvfp4'}"


@pytest.mark.parametrize(
    "mode", ["bf16", MathMode.BF16, lowprec.Recipe("mxfp8", scale_rule="rceil")]
)
def test_a_mode_is_one_rule(mode):
    for given in (mode, str(mode), {"*": mode}):
        assert parse_rules(given) == (("*", mode),)
    assert shown(parse_rules(mode)) == repr(str(mode))


def test_commas_in_recipes_and_brackets_separate_no_rules():
    recipe = "fp8(grad_input=fp8_e5m2/fp8,rounding=stochastic,seed=1)"
    found = parse_rules(f"blocks.[0,1].*={recipe},*=bf16")
    assert [(pattern, str(mode)) for pattern, mode in found] == [
        ("blocks.[0,1].*", recipe),
        ("*", "bf16"),
    ]


def test_classes_and_functions_are_patterns():
    assert parse_rules({int: "bf16", test_a_mode_is_one_rule: "tf32"}) == (
        ("int", MathMode.BF16),
        ("test_a_mode_is_one_rule", MathMode.TF32),
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("bf17", "^math_mode 'bf17' is not a math mode"),
        ("", "^math_mode '' is not a math mode"),
        ("head=bf17", "^the mode of 'head', 'bf17' is not a math mode"),
        ("bf16,head=fp32", "^math_mode 'bf16,head=fp32': 'bf16' is not PATTERN=MODE"),
        ({}, "^math_mode has no rule"),
        ([], "^math_mode has no rule"),
        ([("head", "fp32", 1)], "^a rule is a pair of a pattern and a mode, got "),
        (["fp32"], "^a rule is a pair of a pattern and a mode, got 'fp32'"),
        ({1: "bf16"}, "^the pattern of a rule is a name, a class or a function, got 1"),
        ({"head": 3}, "^the mode of 'head', 3 is not a math mode"),
        (dict, "^math_mode is a type, not a math mode"),
    ],
)
def test_illegal_rules_are_refused(given, says):
    with pytest.raises(lowprec.ModeError, match=says):
        parse_rules(given)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is in Python 3.11")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot read .*modes.toml: No such file"),
        ("rules = 3", "has no table \\[rules\\]"),
        ("[rules", "cannot read .*modes.toml: "),
        ("[rules]", "has no rule"),
        ("[rules]\nhead = 3", "the mode of 'head', 3 is not a math mode"),
    ],
)
def test_illegal_files_are_refused(tmp_path, text, says):
    path = tmp_path / "modes.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(lowprec.ModeError, match=says):
        parse_rules(path)


@pytest.mark.parametrize(
    ("rules", "layer", "routine", "mode"),
    [
        ("head=fp32,*=nvfp4", (("head", "Linear"),), "mm", "fp32"),
        ("head=fp32,*=nvfp4", (("x.head", "Linear"),), "mm", "nvfp4"),
        ("*.head=fp32,*=nvfp4", (("x.head", "Linear"),), "mm", "fp32"),
        ("Linear=fp32,*=nvfp4", (("head", "Linear"),), "mm", "fp32"),
        ("mm=fp32,*=nvfp4", (("head", "Linear"),), "mm", "fp32"),
        ("*=nvfp4,head=fp32", (("head", "Linear"),), "mm", "nvfp4"),
        ("b=fp32,*=nvfp4", (("a", "Linear"), ("b", "Linear")), "mm", "fp32"),
        ("head=fp32", (), "mm", None),
        ("h*=fp32", (), "mm", None),
        ("=fp32", (), "mm", "fp32"),
        ("*=nvfp4", (), "dot", None),
        ("=nvfp4", (), "dot", None),
        ("*=nvfp4", (("head", "Linear"),), "lapack", None),
        ("*=nvfp4,dot=fp32", (), "dot", "fp32"),
        ("head=fp32,*=nvfp4", (("head", "Linear"),), "dot", "fp32"),
    ],
)
def test_the_first_rule_that_matches_is_used(rules, layer, routine, mode):
    assert first_match(parse_rules(rules), layer, routine) == mode


def test_a_rule_names_a_routine():
    assert names(parse_rules("dot=fp32,*=bf16"), "dot")
    assert not names(parse_rules("d*=fp32,*=bf16"), "dot")
