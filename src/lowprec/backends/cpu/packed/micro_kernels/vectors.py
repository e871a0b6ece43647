"""Assembly of micro-kernels on vector units: a dword of A for all columns, multiplied by a row of a tile of B.

An instruction multiplies dwords, pairs of bfloat16 or fours of int8, lane by lane, and adds the products to 32-bit
lanes. A row of a tile of B is a dword of k for 16 columns, so it is one register; a tile of A has the dwords of one of
its rows beside each other, and each is broadcast. The 32 rows of a block are treated in groups, whose accumulators
stay in registers for all steps of a call.

*int8*: the instruction multiplies an unsigned by a signed number, so A is packed as a + 128, and 128 times the sums of
the columns of B is taken off. The first group sums them on the way, with two more multiplications for each row of B by
a constant; the groups after it begin with what it found. All is modulo 2^32, so the result is exact wherever it fits
into int32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lowprec.backends.cpu.packed.job import PREFETCH_LINES
from lowprec.backends.cpu.packed.native import inline_asm

# %rax A, %rcx B, %r8 accumulators, %r9 steps left, %rdx next piece of B.
_B = ("%zmm28", "%zmm29")
_A = ("%zmm30", "%zmm31")
_SUMS = ("%zmm26", "%zmm27")  # of the columns of B, times the offset
_OFFSET = "%zmm25"
#: Rows of the groups: 22 accumulators hide the latency, and leave registers for the rest.
_GROUPS = ((0, 10), (10, 21), (21, 32))


def _accumulators(first: int, end: int) -> list[tuple[str, str]]:
    """Registers of the accumulators of a group, and where they are in memory."""
    return [
        (f"%zmm{2 * (i - first) + t}", f"{(i >> 4) * 2048 + t * 1024 + (i & 15) * 64}(%r8)")
        for i in range(first, end)
        for t in range(2)
    ]


def _step_text(multiply: str, first: int, end: int, *, sums: bool) -> list[str]:
    """One step of k of a group: 16 dwords."""
    lines = []
    for dword in range(16):
        lines += [f"vmovdqa64 {1024 * t + 64 * dword}(%rcx), {_B[t]}" for t in range(2)]
        if first == 0 and dword % (16 // PREFETCH_LINES) == 0:
            lines.append(f"prefetcht1 {64 * (dword * PREFETCH_LINES // 16)}(%rdx)")
        if sums:
            lines += [f"{multiply} {_B[t]}, {_OFFSET}, {_SUMS[t]}" for t in range(2)]
        for i in range(first, end):
            a = _A[i & 1]
            lines.append(f"vpbroadcastd {(i >> 4) * 1024 + (i & 15) * 64 + 4 * dword}(%rax), {a}")
            lines += [f"{multiply} {_B[t]}, {a}, %zmm{2 * (i - first) + t}" for t in range(2)]
    return lines


def _group_text(multiply: str, first: int, end: int, *, offset: int) -> list[str]:
    accumulators = _accumulators(first, end)
    lines = ["movq $0, %rax", "movq $1, %rcx", "movq $3, %r9"]
    lines += ["testq $4, $4", "jz 2f"]
    lines += [f"vmovdqa64 {memory}, {register}" for register, memory in accumulators]
    lines += ["jmp 3f", "2:"]
    lines += [f"vpxord {register}, {register}, {register}" for register, _ in accumulators]
    lines.append("3:")
    take_off = [
        f"vpsubd {_SUMS[i & 1]}, {register}, {register}"
        for i, (register, _) in enumerate(accumulators)
    ]
    if offset and first == 0:
        lines += [f"movl $${offset * 0x01010101}, %eax", f"vpbroadcastd %eax, {_OFFSET}"]
        lines += [f"vpxord {x}, {x}, {x}" for x in _SUMS] + ["movq $0, %rax"]
    elif offset:
        lines += take_off
    lines += ["4:", *_step_text(multiply, first, end, sums=bool(offset and first == 0))]
    lines += ["addq $$2048, %rax", "addq $$2048, %rcx"]
    if first == 0:
        lines.append(f"addq $${64 * PREFETCH_LINES}, %rdx")
    lines += ["subq $$1, %r9", "jnz 4b"]
    if offset and first == 0:
        lines += take_off
    return lines + [f"vmovdqa64 {register}, {memory}" for register, memory in accumulators]


def micro_kernel_text(multiply: str, *, offset: int = 0) -> str:
    """Assembly of a micro-kernel.

    Its operands: $0 A, $1 B, $2 accumulators, $3 steps (at least 1), $4 whether to add to what the
    accumulators hold, $5 where the next piece of B is. ``multiply`` is the instruction, ``offset`` what was added to A.
    """
    lines = ["movq $2, %r8", "movq $5, %rdx"]
    for first, end in _GROUPS:
        lines += _group_text(multiply, first, end, offset=offset)
    return "\n".join([*lines, "vzeroupper"])


_CLOBBERS = ",".join(
    f"~{{{name}}}"
    for name in (
        *("rax", "rcx", "rdx", "r8", "r9", "memory", "flags", "dirflag", "fpsr"),
        *(f"zmm{i}" for i in range(32)),
    )
)


def emit(builder: Any, text: str, args: Sequence[Any]) -> None:
    """Put a micro-kernel in place."""
    inline_asm(builder, text, "r,r,r,r,r,r," + _CLOBBERS, ir.VoidType(), args)


def micro_kernel_intrinsic(multiply: str, *, offset: int = 0) -> Any:
    """Return the micro-kernel as a function for numba."""
    text = micro_kernel_text(multiply, offset=offset)

    @intrinsic
    def micro(typing_context, a, b, acc, steps, add, following):
        def generate(context, builder, signature, args):
            emit(builder, text, args)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6), generate

    return micro
