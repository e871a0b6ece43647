"""The extras for GPUs can be installed next to PyTorch: their bounds admit the versions that PyTorch's wheels pin."""

import csv
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest requires it there
    import tomli as tomllib

packaging_requirements = pytest.importorskip(
    "packaging.requirements", reason="packaging is not installed"
)
ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
    "optional-dependencies"
]
LINES = (ROOT / "tests" / "data" / "pytorch_pins.csv").read_text("utf-8").splitlines()
PINS = list(csv.DictReader(line for line in LINES if not line.startswith("#")))

#: Packages by column of the pins and major version of CUDA.
PACKAGES = {
    "cublas": {"12": "nvidia-cublas-cu12", "13": "nvidia-cublas"},
    "nvrtc": {"12": "nvidia-cuda-nvrtc-cu12", "13": "nvidia-cuda-nvrtc"},
    "bindings": {"12": "cuda-bindings", "13": "cuda-bindings"},
    "cusparselt": {"12": "nvidia-cusparselt-cu12", "13": "nvidia-cusparselt-cu13"},
}
#: Not pinned by PyTorch.
FREE = {"nvmath-python", "cuda-core"}


def requirements(extra):
    """Yield the requirements of an extra, those of its own extras included."""
    for text in EXTRAS[extra]:
        found = packaging_requirements.Requirement(text)
        if found.name == "lowprec":
            for other in found.extras:
                yield from requirements(other)
        else:
            yield found


def refused(extra, pins):
    """Return the requirements of an extra that a wheel's pins do not meet."""
    major = pins["cuda"].partition(".")[0]
    versions = {PACKAGES[column][major]: pins[column] for column in PACKAGES if pins[column]}
    return [
        str(x)
        for x in requirements(extra)
        if x.name in versions and not x.specifier.contains(versions[x.name])
    ]


@pytest.mark.parametrize(
    "pins", PINS, ids=lambda pins: f"torch {pins['torch']} cu{pins['cuda'].replace('.', '')}"
)
def test_an_extra_admits_the_versions_that_pytorch_pins(pins):
    """The extra is that of the major version in ``torch.version.cuda``; the other one conflicts."""
    major = pins["cuda"].partition(".")[0]
    assert refused(f"cuda{major}", pins) == refused(f"sparse{major}", pins) == []
    if pins["bindings"]:
        assert refused("cuda13" if major == "12" else "cuda12", pins)


@pytest.mark.parametrize("major", ["12", "13"])
def test_every_package_of_an_extra_has_pins(major):
    assert {x.name for x in requirements(f"sparse{major}")} == FREE | {
        found[major] for found in PACKAGES.values()
    }
