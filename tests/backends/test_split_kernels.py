"""Products of parts in one pass over packed operands: exact parts, the pairs that are formed, NaN and infinities as in
FP32, sums by chunks of k; and the assembly for AMX, read by an interpreter where there is no AMX.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import lowprec
from lowprec.backends.cpu import device, splitting, threads
from lowprec.backends.cpu.buffers import Workspace
from lowprec.backends.cpu.packed import jobs, run
from lowprec.backends.cpu.packed.micro_kernels import AMX_BF16, AVX512_BF16, MicroKernel
from lowprec.core.executors import clear_caches
from lowprec.formats import DType
from lowprec.modes import TABLE, MathMode, row
from lowprec.planning import Capabilities, GemmProblem, OperandSpec, plan_gemm
from support import cpu_units, machines, oracles
from support.cpu_units import needs

pytest.importorskip("numba")

MODES = ["bf16x3", "bf16x6", "bf16x9", "tf32x3"]
TOP = np.float32(3.4028235e38)

kernels = cpu_units.kernels(AMX_BF16, AVX512_BF16)


def test_a_mode_is_packed_as_another_with_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    new = [replace(row(MathMode(name)), mode=MathMode.FP32_EMULATED) for name in MODES]
    for like, made in zip(("bf16x3", "bf16x6", "bf16x6", "tf32x3"), new, strict=True):
        # At any place in the table.
        kept = (r for r in TABLE if r.mode is not MathMode.FP32_EMULATED)
        monkeypatch.setattr(jobs, "TABLE", (made, *kept))
        found = jobs._scheme("float32", "fp32_emulated", "bfloat16", 0)
        assert found is jobs._scheme("float32", like, "bfloat16", 0)
    assert jobs._scheme("float32", "tf32", "bfloat16", 0).parts == 2


def gemm(kernel: MicroKernel, a: np.ndarray, b: np.ndarray, mode: str, **given: Any) -> Any:
    """Return the product, and whether it is finite everywhere."""
    out = np.zeros((a.shape[0], b.shape[1]), np.float32)
    done = run.gemm(kernel, a, b, out, rounding=mode, **given)
    return out, done


# -- the numbers ----------------------------------------------------------------------------------


@kernels
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", ["a", "b"])
def test_parts_add_up_to_the_number(kernel: MicroKernel, mode: str, side: str, rng: np.random.Generator) -> None:
    """Times one, with the smallest added first: bit for bit for three parts, and for numbers of so many bits."""
    # Where the last part falls below 2^-126 the units take it for zero.
    x = oracles.every_exponent(rng, 16)
    x = x[(np.abs(x) < 2.0**128 - 2.0**119) & (np.abs(x) >= 2.0**-98)]
    bits = {"bf16x3": 16, "tf32x3": 22}.get(mode, 24)
    x = (x.view(np.uint32) & np.uint32(2**32 - (1 << (24 - bits)))).view(np.float32)
    one = np.ones((1, 1), np.float32)
    a, b = (x[:, None], one) if side == "a" else (one, x[None, :])
    got, done = gemm(kernel, a, b, mode)
    assert done
    np.testing.assert_array_equal(got.ravel(), x)


@kernels
@pytest.mark.parametrize("mode", MODES)
def test_the_pairs_of_the_mode_are_formed_and_no_others(
    kernel: MicroKernel, mode: str, rng: np.random.Generator
) -> None:
    """k = 1 and operands whose parts have few bits: the sum of the products that the mode forms is one float32."""
    scale = 2.0 ** -np.arange(3) if mode == "tf32x3" else 2.0 ** np.array([0, -7, -14])
    found = row(MathMode(mode))
    x, y = ((1 + rng.integers(0, 2, 40) * scale[1] / 16 + rng.integers(0, 2, 40) * scale[2] / 16) for _ in "ab")
    a, b = x.astype(np.float32)[:, None], y.astype(np.float32)[None, :]
    with Workspace() as workspace:
        parts = [
            splitting.split(z, z.dtype, found, found.operand_format, found.parts, None, workspace).parts for z in (a, b)
        ]
        want = sum(parts[0][i].astype(np.float64) @ parts[1][j].astype(np.float64) for i, j in found.pairs)
    got, _ = gemm(kernel, a, b, mode)
    np.testing.assert_array_equal(got, np.asarray(want, np.float32))


@kernels
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", [40, 700, 2500])
def test_errors_are_within_the_plans_bound(kernel: MicroKernel, mode: str, k: int, rng: np.random.Generator) -> None:
    """Element by element, on data that hurt: all of one sign, wide, cancelling, each rounding in one direction."""
    names = {"amx_bf16": ("amx_bf16_parts", "amx_bf16_pair_parts"), "avx512_bf16": ("avx512_bf16_parts",)}
    row_name = names[kernel.name][-1 if mode == "tf32x3" else 0]
    rows = (machines.ROWS[row_name]._replace(requires=None, minimum_elements=0), machines.ROWS["numpy"])
    if mode == "tf32x3" and kernel is AVX512_BF16:  # no row of its own: it would not pay
        rows = (rows[0]._replace(formats=frozenset({"tf32"}), parts=2), rows[1])
    able = Capabilities("cpu", "a CPU", rows)
    spec = [OperandSpec.contiguous(DType.FLOAT32, s) for s in ((33, k), (k, 35))]
    plan = plan_gemm(GemmProblem(*spec), able, MathMode(mode))
    assert plan.kernel_row is rows[0]
    assert plan.bound.relative < k * 2.0**-24 + 2.0**-14
    draws = {
        "normal": lambda s: rng.standard_normal(s),
        "positive": lambda s: rng.random(s),
        "wide": lambda s: rng.standard_normal(s) * 2.0 ** rng.uniform(-25, 25, s),
        "constant": lambda s: np.full(s, 1 + 2.0**-8 - 2.0**-23),
        "halves": lambda s: np.full(s, 1 + 2.0**-9 + 2.0**-17 - 2.0**-22),
    }
    for name, draw in draws.items():
        a, b = (draw(s).astype(np.float32) for s in ((33, k), (k, 35)))
        x, y = a.astype(np.float64), b.astype(np.float64)
        got, done = gemm(kernel, a, b, mode)
        assert done
        lost = plan.bound.operand_absolute * (np.abs(x).sum(1)[:, None] + np.abs(y).sum(0) + k)
        allowed = plan.bound.relative * (np.abs(x) @ np.abs(y)) + lost + plan.bound.result_absolute
        assert (np.abs(got - x @ y) <= allowed).all(), name


@needs(AVX512_BF16)
def test_chunks_of_k_begin_again(rng: np.random.Generator) -> None:
    """Three ranges of k: each is summed alone, and the sums are added in float32, in order."""
    k = 3 * 672
    a, b = (rng.standard_normal(s, dtype=np.float32) for s in ((40, k), (k, 40)))
    want = np.zeros((40, 40), np.float32)
    for at in range(0, k, 672):
        want += gemm(AVX512_BF16, a[:, at : at + 672], b[at : at + 672], "bf16x6")[0]
    got, _ = gemm(AVX512_BF16, a, b, "bf16x6")
    np.testing.assert_array_equal(got, want)


@kernels
@pytest.mark.parametrize("mode", ["bf16x6", "tf32x3"])
def test_small_products_do_not_cost_accuracy(kernel: MicroKernel, mode: str, rng: np.random.Generator) -> None:
    """Less error than one FP32 sum over the same k, although there are six or twelve products for each of its own."""
    a, b = (rng.standard_normal(s, dtype=np.float32) for s in ((96, 4096), (4096, 96)))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    single = np.zeros((96, 96), np.float32)
    for i in range(4096):
        single += a[:, i, None] * b[i]
    got, _ = gemm(kernel, a, b, mode)
    assert np.linalg.norm(got - exact) < 0.7 * np.linalg.norm(single - exact)


# -- NaN and infinities ---------------------------------------------------------------------------

BAD = {
    "inf": np.float32(np.inf),
    "-inf": np.float32(-np.inf),
    "nan": np.float32(np.nan),
    "largest": TOP,  # rounds to an infinity
    "signaling": np.uint32(0x7F800001).view(np.float32),
    "all ones": np.uint32(0x7FFFFFFF).view(np.float32),
    "-all ones": np.uint32(0xFFFFFFFF).view(np.float32),
}


@kernels
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.sampled(3)
def test_a_value_that_no_part_holds_is_reported_and_spoils_its_row_or_column(
    kernel: MicroKernel, mode: str, name: str, order: Any, side: str, rng: np.random.Generator
) -> None:
    a, b = (rng.standard_normal(s, dtype=np.float32) for s in ((70, 1500), (1500, 70)))
    a, b = np.asarray(a, order=order), np.asarray(b, order=order)
    clean, done = gemm(kernel, a, b, mode)
    assert done
    spoiled = np.zeros((70, 70), bool)
    if side == "a":
        a[37, 1400] = BAD[name]
        spoiled[37] = True
    else:
        b[1400, 65] = BAD[name]
        spoiled[:, 65] = True
    for given in ({}, {"activation": "relu", "alpha": 2.0}):
        got, done = gemm(kernel, a, b, mode, **given)
        assert not done
        if not given:
            np.testing.assert_array_equal(np.isfinite(got), ~spoiled)
            np.testing.assert_array_equal(got[~spoiled], clean[~spoiled])


@contextlib.contextmanager
def parts_on_units() -> Iterator[None]:
    """Run on this machine's kernel for parts, whatever the size."""
    own = [x._replace(minimum_elements=0, minimum_elements_complex=0, minimum_extent_complex=0)
           for x in device.capabilities(lowprec.arrays.CPU).kernels
           if x.shares_sums and x.requires in device.features()]  # fmt: skip
    with machines.with_rows(*(x._replace(requires=None) for x in own), machines.ROWS["numpy"]):
        yield


@needs(AVX512_BF16)
def test_out_that_is_c_is_added_once_although_a_sum_is_computed_again(rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal(s, dtype=np.float32) for s in ((40, 50), (50, 45)))
    a[3, 4] = TOP
    b[4] = np.abs(b[4]) * 0.01
    for order in "CF":
        out = np.ones((40, 45), np.float32, order=order)
        want = a.astype(np.float64) @ b + 2.0
        with parts_on_units():
            lowprec.matmul(a, b, c=out, beta=2.0, out=out, math_mode="bf16x6")
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-4)


@needs(AVX512_BF16)
def test_operands_of_16_bits_are_one_part(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    import ml_dtypes

    seen = []

    def job_spy(kernel: MicroKernel, m: int, n: int, k: int, x: Any, y: Any, *rest: Any) -> Any:
        seen.append([x.dtype, y.dtype])
        return job_here(kernel, m, n, k, x, y, *rest)

    def gemm_spy(kernel: MicroKernel, x: Any, y: Any, *rest: Any, **given: Any) -> bool:
        seen.append([x.dtype.name, y.dtype.name])
        return gemm_here(kernel, x, y, *rest, **given)

    a = rng.standard_normal((40, 50)).astype(ml_dtypes.bfloat16)
    b = rng.standard_normal((50, 45), dtype=np.float32)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    with parts_on_units():
        for x, y, want in ((a, b, exact), (b.T, a.T, exact.T)):
            plan = lowprec.plan(x, y, math_mode="bf16x6")
            assert (plan.kernel_row.shares_sums, plan.products) == (True, 3)
            job_here, gemm_here = run.job_of, run.gemm  # units in software have no jobs
            with monkeypatch.context() as patch:
                patch.setattr(run, "job_of", job_spy)
                patch.setattr(run, "gemm", gemm_spy)
                clear_caches()
                got = lowprec.matmul(x, y, math_mode="bf16x6")
            assert seen.pop() == [x.dtype.name, y.dtype.name]
            np.testing.assert_allclose(got, want, rtol=0, atol=50 * 2.0**-22)


# -- the plan -------------------------------------------------------------------------------------


def square(n: int, **given: Any) -> GemmProblem:
    spec = OperandSpec.contiguous(DType.FLOAT32, (n, n))
    return GemmProblem(spec, spec, **given)


@pytest.mark.parametrize(
    ("mode", "kernel", "products", "parts"),
    [
        ("bf16x3", "amx_bf16_parts", 3, 2),
        ("bf16x6", "amx_bf16_parts", 6, 3),
        ("bf16x9", "amx_bf16_parts", 9, 3),
        ("tf32x3", "amx_bf16_pair_parts", 12, 4),
        ("fp16x3", "openblas", 3, 2),
        ("bf16", "amx_bf16", 1, 1),
    ],
)
def test_amx_takes_products_of_parts(mode: str, kernel: str, products: int, parts: int) -> None:
    plan = plan_gemm(square(1024), machines.AMX, MathMode(mode))
    assert (plan.kernel, plan.products, plan.parts) == (kernel, products, parts)
    if kernel != "openblas":
        assert plan.passed_over == ()


@pytest.mark.parametrize("n", [1024, 2048, 4096])
def test_fp32_emulated_takes_tiles_and_is_as_exact(n: int) -> None:
    plan, fp32 = (plan_gemm(square(n), machines.AMX, MathMode(x)) for x in ("fp32_emulated", "fp32"))
    assert (plan.scheme, plan.kernel) == (MathMode.BF16X6, "amx_bf16_parts")
    assert plan.bound.relative <= fp32.bound.relative


@pytest.mark.parametrize("n", [128, 1024, 4096])
def test_vector_units_do_not_replace_fp32(n: int) -> None:
    """Six products at 0.4 of the cost each; bf16x6 uses them."""
    plan = plan_gemm(square(n), machines.AVX512, MathMode.FP32_EMULATED)
    assert plan.scheme is MathMode.FP32
    plan = plan_gemm(square(n), machines.AVX512, MathMode.BF16X6)
    assert plan.kernel == "avx512_bf16_parts"


# -- AMX, read by an interpreter ------------------------------------------------------------------


class Tiles:
    """Runs what ``amx.micro_kernel_text`` writes on memory that is an array; one tile operation after the other."""

    def __init__(self, text: str, memory: np.ndarray, arguments: list[int]) -> None:
        self.memory, self.tiles = memory, [np.zeros(1024, np.uint8) for _ in range(8)]
        self.registers = {f"${i}": value for i, value in enumerate(arguments)}
        self.lines = text.split("\n")
        self.loads = self.multiplications = 0
        self.prefetched: list[int] = []

    def value(self, word: str) -> int:
        return int(word[2:]) if word.startswith("$$") else self.registers[word]

    def run(self) -> None:
        at, zero = 0, False
        while at < len(self.lines):
            line, at = self.lines[at], at + 1
            if re.fullmatch(r"\d:", line):
                continue
            name, _, rest = line.partition(" ")
            words = re.split(r", (?![^(]*\))", rest)
            if name == "movq":
                self.registers[words[1]] = self.value(words[0])
            elif name in ("addq", "subq"):
                sign = 1 if name == "addq" else -1
                self.registers[words[1]] += sign * self.value(words[0])
                zero = self.registers[words[1]] == 0
            elif name == "testq":
                zero = self.value(words[0]) & self.value(words[1]) == 0
            elif name in ("jz", "jnz", "jmp"):
                if name == "jmp" or (name == "jz") == zero:
                    at = self.label(rest, at)
            else:
                self.tile(name, words)

    def label(self, word: str, at: int) -> int:
        places = [i for i, line in enumerate(self.lines) if line == f"{word[0]}:"]
        return min(x for x in places if x >= at) if word[1] == "f" else max(x for x in places if x < at)

    def address(self, word: str) -> int:
        offset, base, index = re.fullmatch(r"(\d+)\((%\w+)(?:,(%\w+),1)?\)", word).groups()
        assert index is None or self.registers[index] == 64
        return int(offset) + self.registers[base]

    def tile(self, name: str, words: list[str]) -> None:
        if name.startswith("prefetch"):
            self.prefetched.append(self.address(words[0]))
        elif name == "tilezero":
            self.tiles[int(words[0][-1])][:] = 0
        elif name in ("tileloadd", "tileloaddt1"):
            at = self.address(words[0])
            assert 0 <= at <= len(self.memory) - 1024
            self.tiles[int(words[1][-1])][:] = self.memory[at : at + 1024]
            self.loads += 1
        elif name == "tilestored":
            at = self.address(words[1])
            self.memory[at : at + 1024] = self.tiles[int(words[0][-1])]
        else:
            assert name == "tdpbf16ps"
            b, a, to = (self.tiles[int(word[-1])] for word in words)
            self.multiplications += 1
            x, y = (
                (z.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(16, 16, 2).astype(np.float64)
                for z in (a, b)
            )
            total = to.view(np.float32).reshape(16, 16)
            total += np.einsum("mkp,knp->mn", x, y).astype(np.float32)


PAIRS = {
    "bf16": (((0, 0),), 16),
    "tf32": (((1, 1), (1, 0), (0, 1), (0, 0)), 10),
    "one and two": (((0, 1), (0, 0)), 6),
    "bf16x3": (((0, 1), (1, 0), (0, 0)), 8),
    "bf16x6": (((0, 2), (1, 1), (2, 0), (0, 1), (1, 0), (0, 0)), 14),
    "bf16x9": (tuple(itertools.product((2, 1, 0), repeat=2)), 20),
    "tf32x3": (tuple((2 * i + x, 2 * j + y) for i, j in ((0, 1), (1, 0), (0, 0)) for x in (1, 0) for y in (1, 0)), 26),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("add", [0, 1])
def test_the_tiles_that_amx_multiplies(name: str, steps: int, add: int, rng: np.random.Generator) -> None:
    from lowprec.backends.cpu.packed.job import PREFETCH_LINES
    from lowprec.backends.cpu.packed.micro_kernels import amx

    pairs, loads = PAIRS[name]
    ordered = amx.in_tile_order(pairs)
    assert sorted(ordered) == sorted(pairs)
    parts = [1 + max(pair[side] for pair in pairs) for side in (0, 1)]
    # Small integers, so that every sum is exact: step, part, tile, row, dword of k, which of the two.
    a, b = (rng.integers(-3, 4, (steps, count, 2, 16, 16, 2)).astype(np.float32) for count in parts)
    acc = rng.integers(-9, 10, (2, 2, 16, 16)).astype(np.float32)
    packed = [(x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).ravel() for x in (a, b)]
    at_b, at_acc = packed[0].size, packed[0].size + packed[1].size
    memory = np.concatenate([*packed, acc.view(np.uint8).ravel()])
    following = 1 << 40
    tiles = Tiles(amx.micro_kernel_text("tdpbf16ps", ordered), memory, [0, at_b, at_acc, steps, add, following])
    tiles.run()
    # A: a row of the tile is a lane; B: a row is a dword of k.
    want = acc * add
    for s, (i, j) in itertools.product(range(steps), pairs):
        want += np.einsum("imkp,jknp->ijmn", a[s, i], b[s, j])
    got = memory[at_acc:].view(np.float32).reshape(2, 2, 16, 16)
    np.testing.assert_array_equal(got, want)
    assert tiles.multiplications == 4 * len(pairs) * steps
    if name != "bf16":
        assert tiles.loads == loads * steps + 4 * add
    share = 64 * np.arange(steps * PREFETCH_LINES * parts[1])
    assert tiles.prefetched == list(following + share)


def test_amx_text_is_assembled_for_every_mode() -> None:
    """LLVM encodes each tile product, though this machine may not run it."""
    import llvmlite.binding as llvm
    from llvmlite import ir

    from lowprec.backends.cpu.packed.micro_kernels import amx
    from lowprec.backends.cpu.packed.native import inline_asm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple("x86_64-unknown-linux-gnu").create_target_machine(cpu="sapphirerapids")
    for pairs, _ in PAIRS.values():
        module = ir.Module()
        integer = ir.IntType(64)
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [integer] * 6), "micro")
        builder = ir.IRBuilder(function.append_basic_block())
        text = amx.micro_kernel_text("tdpbf16ps", amx.in_tile_order(pairs))
        inline_asm(builder, text, "r,r,r,r,r,r," + amx._CLOBBERS, ir.VoidType(), function.args)
        builder.ret_void()
        module.triple = "x86_64-unknown-linux-gnu"
        # VEX.128.F3.0F38.W0 5C is TDPBF16PS.
        encoded = re.findall(rb"\xc4[\xe2\xc2]..", machine.emit_object(llvm.parse_assembly(str(module))), re.DOTALL)
        products = [code for code in encoded if code[3] == 0x5C and code[2] & 0x87 == 2]
        assert len(products) == text.count("tdpbf16ps") >= 4 * len(pairs)


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize("mode", ["bf16x3", "bf16x9"])
def test_a_job_with_a_sum_that_is_not_finite_runs_again(
    mode: str, count: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any number of threads, with a prepared b, too; other elements keep their bits."""
    a, b = (rng.standard_normal((count, 32, 32), dtype=np.float32) for _ in "ab")
    bias, touched = np.arange(32, dtype=np.float32), np.zeros(a.shape, bool)
    clean = lowprec.matmul(a, b, bias=bias, activation="relu", math_mode=mode)
    a[0, 5, 3], a[-1, 9, 2] = np.inf, np.nan
    touched[0, 5], touched[-1, 9] = True, True
    for workers in (1, 2, 5):
        monkeypatch.setattr(threads, "num_threads", lambda workers=workers: workers)
        for y in (b, lowprec.prepare(b, math_mode=mode)):
            found = lowprec.matmul(a, y, bias=bias, activation="relu", math_mode=mode)
            np.testing.assert_array_equal(found[~touched], clean[~touched])
            np.testing.assert_array_equal(found[0, 5], np.where(b[0, 3] > 0, np.inf, 0))
            assert np.isnan(found[-1, 9]).all()
