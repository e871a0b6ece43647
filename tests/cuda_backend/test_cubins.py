"""The kernels as NVRTC compiles them for GPUs: their parameters, and spills and the width of accesses in the code."""

import functools
from typing import NamedTuple

import pytest

from lowprec.backends.cuda import compiling
from support.cubin import accesses, instructions_of_loop, nvdisasm, read_cubin
from support.kernel_variants import Variant, every_variant

#: Architecture and part of the kernels: all of them for the first, every sixth for the others.
SAMPLES = [
    *[("sm_90", i, 6) for i in range(6)],
    *[(name, i, 6) for i, name in enumerate(("sm_80", "sm_100", "sm_75", "sm_89", "sm_120"))],
]

ITEMSIZE = {name: dtype.itemsize for dtype, name in compiling.ELEMENT.items()}


@pytest.fixture(scope="module", autouse=True)
def tools():
    core = pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    if nvdisasm() is None:
        pytest.skip("nvdisasm is not installed (nvidia-cuda-nvdisasm)")
    try:
        core.Program("", "c++", core.ProgramOptions(arch="sm_90")).compile("cubin")
    except Exception as error:
        if "nvrtc" not in str(error).lower():
            raise
        pytest.skip("NVRTC is not installed")


variants = functools.cache(every_variant)


def compile_variant(variant, architecture):
    return compile_source(variant.name, variant.source, architecture)


@functools.cache
def compile_source(name, source, architecture):
    import cuda.core

    return read_cubin(compiling._compiled(cuda.core, architecture, name, source), name)


class Width(NamedTuple):
    """Bits of the accesses to whole groups of elements, and how many of them a thread makes at least."""

    bits: int
    count: int


def widths(variant):
    """Return the loads and stores that the aligned path of a kernel consists of; zero of them if it has none."""
    macros = variant.macros
    none = Width(32, 0)
    if variant.name == "epilogue":
        sizes = [ITEMSIZE[macros[x]] for x in ("PRODUCT", "RESULT")]
        if macros["VECTOR"] == "0":
            return none, none
        taken = max(1, 16 // min(sizes))
        return Width(128, taken * sizes[0] // 16), Width(128, taken * sizes[1] // 16)
    if variant.name == "quantize" and macros["SEEKS"] == "0":  # 16 numbers, in one store or several
        nbytes = 8 if macros["SCALES"] == "5" else 16 * ITEMSIZE[macros["TARGET"]]
        loads = ITEMSIZE[macros["SOURCE"]] if macros["LOADS"] == "2" else 0
        return Width(128, loads), Width(min(8 * nbytes, 128), max(nbytes // 16, 1))
    if variant.name not in ("pack_groups", "pack_rows", "pack_tiles"):
        return none, none
    source, out = (
        ITEMSIZE[macros["SOURCE"]],
        ITEMSIZE[macros["TARGET"]] * (1 + int(macros["PAIRS"])),
    )
    lines = 1 + int(macros["ROTATED"])
    if variant.name == "pack_tiles":  # words of one row or column, next to those of other threads
        return Width(8 * max(2 if out == 16 else 4, source), 1), Width(8 * max(4, out), lines)
    taken, parts = max(1, 16 // min(source, out)), int(macros["PARTS"])
    reads = 2 if variant.name == "pack_rows" else 1
    return Width(128, reads * taken * source // 16), Width(128, parts * lines * taken * out // 16)


def faults(variant, cubin, code):
    """Return what is wrong with a compiled kernel."""
    found = []
    if cubin.parameters != [(8 * i, 8) for i in range(variant.arguments)]:
        found.append(f"a launch passes {variant.arguments} times 8 bytes, not {cubin.parameters}")
    if cubin.stack or any(name in ("LDL", "STL") for name, _ in code):
        found.append(f"registers are spilled: {cubin.stack} bytes of stack")
    for name, (bits, least) in zip(("LDG", "STG"), widths(variant), strict=True):
        if code[name, bits] < least:
            found.append(f"{code[name, bits]} of {least} {name} of {bits} bits: {dict(code)}")
    return [f"{variant}: {text}" for text in found]


@pytest.mark.parametrize(("architecture", "first", "step"), SAMPLES)
def test_compiled_kernels(architecture, first, step, tmp_path):
    chosen = variants()[first::step]
    assert len(chosen) > 50
    cubins = [compile_variant(variant, architecture) for variant in chosen]
    counted = accesses([cubin.text for cubin in cubins], architecture, tmp_path)
    assert [x for row in zip(chosen, cubins, counted, strict=True) for x in faults(*row)] == []


#: Numbers of a thread of the quantising kernel, and the most instructions for each.
NUMBERS, MOST_INSTRUCTIONS = 16, 60


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_rounding_takes_few_instructions(architecture, tmp_path):
    """The memory bounds the kernel: 5 bytes a number take the time of as many instructions."""
    counted = {}
    for variant in variants():
        macros = variant.macros
        if variant.name != "quantize" or macros["STOCHASTIC"] == "1" or macros["HADAMARD"] == "1":
            continue
        # Targets that no plan has there, or with these scales.
        if (architecture == "sm_80" and macros["TARGET"] in ("E4M3", "E5M2")) or (
            macros["TARGET"] == "float" and macros["SCALING"] != "5"
        ):
            continue
        text = compile_variant(variant, architecture).text
        counted[str(variant)] = instructions_of_loop(text, architecture, tmp_path) / NUMBERS
    assert len(counted) > 20
    assert {name: count for name, count in counted.items() if count >= MOST_INSTRUCTIONS} == {}


BROKEN = """
extern "C" __global__ void pack_groups(const float* source, unsigned short* out, {parameter} number)
{{
{body}
}}
"""
NARROW = "for (int i = 0; i < 8; ++i) out[i] = source[i];"
SPILLED = "float x[64]; for (int i = 0; i < 64; ++i) x[number + i & 63] = source[i]; out[0] = x[number >> 3 & 63];"
NARROW_FAULTS = ["of 2 LDG of 128 bits", "0 of 1 STG of 128 bits"]


@pytest.mark.parametrize(
    ("parameter", "body", "words"),
    [
        ("int", NARROW, ["a launch passes 3 times 8 bytes", *NARROW_FAULTS]),
        ("long long", NARROW, NARROW_FAULTS),
        ("long long", SPILLED, ["registers are spilled: 256 bytes of stack", *NARROW_FAULTS]),
    ],
    ids=["narrow parameter", "narrow store", "spill"],
)
def test_faults_are_found(parameter, body, words, tmp_path):
    macros = {"SOURCE": "float", "TARGET": "Brain", "PAIRS": "0", "ROTATED": "0", "PARTS": "1"}
    variant = Variant("pack_groups", BROKEN.format(parameter=parameter, body=body), macros, 3)
    cubin = compile_variant(variant, "sm_90")
    (code,) = accesses([cubin.text], "sm_90", tmp_path)
    found = faults(variant, cubin, code)
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True)), found
