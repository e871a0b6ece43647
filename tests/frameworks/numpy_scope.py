"""A plugin of pytest that runs each test inside NumPy's block; NumPy's own test files are run with it."""

import sys

import pytest

import lowprec.numpy

TAKEN = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    with lowprec.numpy.intercept("fp32") as seen:
        try:
            return (yield)
        finally:
            TAKEN.extend(p.count for p in seen.report().taken)


def pytest_unconfigure():
    sys.stdout.write(f"\ntaken: {sum(TAKEN)}\n")
