"""Assembly of micro-kernels on vector units: a broadcast dword of A times a row of a tile of B.

An instruction multiplies dwords (two bfloat16, four int8, or one float32) lane by lane and adds the products to 32-bit
lanes. A row of a tile of B is a dword of k for 16 columns; the dwords of a row of A are contiguous, and each is
broadcast. A 32 x 32 block is computed in groups of a few rows and two registers of columns, whose accumulators stay in
registers. Products of parts are summed one after the other, each over all steps, the smallest first.

*float32*: each call sums separately and adds its sums to the accumulators (`adds_sums`): blocks of sums have smaller
errors than one long sum.

*int8*: the instruction multiplies an unsigned by a signed number, so A is packed as a + 128, and 128 times the column
sums of B is subtracted. The first group of rows computes these sums with two more multiplications per row of B; the
other groups reuse them. All is modulo 2^32, so a result that fits int32 is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from lowprec.backends.cpu.packed.job import PREFETCH_LINES
from lowprec.backends.cpu.packed.micro_kernels import Pairs
from lowprec.backends.cpu.packed.native import assembled


@dataclass(frozen=True)
class Registers:
    """Register allocation and instructions of an instruction set."""

    name: str  # ``"zmm"`` or ``"ymm"``; the first registers are accumulators
    #: Registers for a row of B, for the dwords of A (used in turn), and for the sums of B's columns.
    b: tuple[int, int]
    a: tuple[int, int]
    sums: tuple[int, int]
    offset: int  # for the number added to A, in the first group
    #: Offsets in bytes of a group's two registers of columns in a block of B and of accumulators.
    columns: tuple[tuple[int, int], ...]
    #: Rows of the groups, enough accumulators to hide the latency of the instruction.
    rows: tuple[int, ...]
    few_rows: dict[int, tuple[int, ...]]  # the same for micro-kernels of fewer rows
    move: str
    zero: str

    def __getitem__(self, number: int) -> str:
        return f"%{self.name}{number}"


AVX512 = Registers(
    "zmm", (28, 29), (30, 31), (26, 27), 25, ((0, 1024),), (10, 11, 11), {8: (8,), 16: (8, 8)}, "vmovdqa64", "vpxord"
)
AVX2 = Registers(
    "ymm", (12, 13), (14, 15), (10, 11), 9, ((0, 32), (1024, 1056)), (4, 5, 5, 5, 5, 5, 3),
    {8: (4, 4), 16: (4, 4, 4, 4)}, "vmovdqa", "vpxor",
)  # fmt: skip


@dataclass(frozen=True)
class _Group:
    registers: Registers
    multiply: str
    offset: int
    first: int
    end: int
    columns: tuple[int, int]
    adds_sums: bool

    @property
    def sums_columns(self) -> bool:
        return bool(self.offset) and self.first == 0

    @property
    def accumulators(self) -> list[tuple[str, str]]:
        """Registers and their memory operands."""
        return [
            (self.registers[2 * (i - self.first) + t], f"{(i >> 4) * 2048 + (i & 15) * 64 + self.columns[t]}(%r8)")
            for i in range(self.first, self.end)
            for t in range(2)
        ]

    def begin(self) -> list[str]:
        """Initial values of the sums."""
        r = self.registers
        zeros = [f"{r.zero} {x}, {x}, {x}" for x, _ in self.accumulators]
        if self.adds_sums:
            # The accumulators may have been evicted.
            return [f"prefetcht0 {memory}" for _, memory in self.accumulators] + zeros
        loads = [f"{r.move} {memory}, {register}" for register, memory in self.accumulators]
        return ["testq $4, $4", "jz 2f", *loads, "jmp 3f", "2:", *zeros, "3:"]

    def step(self, prefetches: bool) -> list[str]:
        """One step of k: 16 dwords."""
        r, lines = self.registers, []
        b, sums = [r[x] for x in r.b], [r[x] for x in r.sums]
        for dword in range(16):
            lines += [f"{r.move} {self.columns[t] + 64 * dword}(%rcx), {b[t]}" for t in range(2)]
            if prefetches and dword % (16 // PREFETCH_LINES) == 0:
                lines.append(f"prefetcht1 {64 * (dword * PREFETCH_LINES // 16)}(%rdx)")
            if self.sums_columns:
                lines += [f"{self.multiply} {b[t]}, {r[r.offset]}, {sums[t]}" for t in range(2)]
            for i in range(self.first, self.end):
                a, at = r[r.a[i & 1]], (i >> 4) * 1024 + (i & 15) * 64 + 4 * dword
                lines.append(f"vpbroadcastd {at}(%rax), {a}")
                lines += [f"{self.multiply} {b[t]}, {a}, {r[2 * (i - self.first) + t]}" for t in range(2)]
        return lines

    def product(self, i: int, j: int, parts: tuple[int, int], prefetches: bool) -> list[str]:
        """All steps of the product of two parts."""
        lines = ["movq $0, %rax", "movq $1, %rcx", "movq $3, %r9"]
        lines += [f"addq $${2048 * part}, %r{x}x" for x, part in (("a", i), ("c", j)) if part]
        lines += ["4:", *self.step(prefetches)]
        lines += [f"addq $${2048 * parts[0]}, %rax", f"addq $${2048 * parts[1]}, %rcx"]
        if prefetches:
            lines.append(f"addq $${64 * PREFETCH_LINES}, %rdx")
        return [*lines, "subq $$1, %r9", "jnz 4b"]

    def text(self, products: Pairs) -> list[str]:
        r = self.registers
        parts = 1 + max(i for i, _ in products), 1 + max(j for _, j in products)
        lines = self.begin()
        sums = [r[x] for x in r.sums]
        take_off = [f"vpsubd {sums[i & 1]}, {x}, {x}" for i, (x, _) in enumerate(self.accumulators)]
        if self.sums_columns:
            lines += [f"movl $${self.offset * 0x01010101}, %eax", f"vmovd %eax, %xmm{r.offset}"]
            lines.append(f"vpbroadcastd %xmm{r.offset}, {r[r.offset]}")
            lines += [f"{r.zero} {x}, {x}, {x}" for x in sums]
        elif self.offset:
            lines += take_off
        is_first = self.first == 0 and self.columns[0] == 0
        for number, (i, j) in enumerate(products):
            # Each product prefetches the share of one part of B.
            lines += self.product(i, j, parts, is_first and number < parts[1])
        if self.sums_columns:
            lines += take_off
        if self.adds_sums:
            lines += ["testq $4, $4", "jz 5f"]
            lines += [f"vaddps {memory}, {x}, {x}" for x, memory in self.accumulators]
            lines.append("5:")
        return lines + [f"{r.move} {register}, {memory}" for register, memory in self.accumulators]


#: Registers, instruction, number added to A, and whether each call sums separately, by micro-kernel.
_INSTRUCTIONS: dict[str, tuple[Registers, str, int, bool]] = {
    "avx512_bf16": (AVX512, "vdpbf16ps", 0, False),  # pairs of bfloat16 into float32
    "avx512_fp32": (AVX512, "vfmadd231ps", 0, True),
    "avx512_vnni": (AVX512, "vpdpbusd", 128, False),  # fours of unsigned by signed int8 into int32
    "avx_vnni": (AVX2, "{vex} vpdpbusd", 128, False),
}


@cache
def emit(name: str, products: Pairs, rows: int = 32) -> int:
    """Return the address of a micro-kernel for these products of parts and 8, 16 or 32 rows."""
    registers, multiply, offset, adds_sums = _INSTRUCTIONS[name]
    # %rax A, %rcx B, %r8 accumulators, %r9 steps left, %rdx next piece of B.
    lines = ["movq $2, %r8", "movq $5, %rdx"]
    for columns in registers.columns:
        first = 0
        for count in registers.rows if rows == 32 else registers.few_rows[rows]:
            group = _Group(registers, multiply, offset, first, first + count, columns, adds_sums)
            lines += group.text(products)
            first += count
    lines.append("vzeroupper")
    general = ("rax", "rcx", "rdx", "r8", "r9", "memory", "flags", "dirflag", "fpsr")
    used = tuple(f"{registers.name}{i}" for i in range(registers.a[1] + 1))
    clobbers = ",".join(f"~{{{register}}}" for register in general + used)
    return assembled(f"{name} {products} {rows}", "\n".join(lines), clobbers)
