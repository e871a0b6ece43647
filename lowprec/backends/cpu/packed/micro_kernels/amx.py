"""The AMX micro-kernel: ``TDPBF16PS`` and ``TDPBSSD`` on 16 x 16 tiles.

The assembly is generated from a list of products of parts: ``(i, j)`` multiplies part i of A by part j of B. All
products add to the same four accumulator tiles, step by step, and a tile is loaded only if the part changes: four
products of two parts take 10 loads for 16 multiplications, six of three parts 14 for 24. A is loaded with the
non-temporal hint (``TILELOADDT1``), so that it does not evict B from the L1 cache; this gains 35 % for one product.
"""

from __future__ import annotations

from functools import cache

from lowprec.backends.cpu.packed.job import PREFETCH_LINES
from lowprec.backends.cpu.packed.micro_kernels import Pairs
from lowprec.backends.cpu.packed.native import assembled


def in_tile_order(products: Pairs) -> Pairs:
    """Sort products of parts so that consecutive ones share a part if possible; small parts of A first.

    Examples
    --------
    >>> in_tile_order(((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0)))
    ((2, 0), (1, 0), (1, 1), (0, 1), (0, 2), (0, 0))
    """
    ordered: list[tuple[int, int]] = []
    for part in sorted({i for i, _ in products}, reverse=True):
        loaded = ordered[-1][1] if ordered else None
        with_part = (pair for pair in products if pair[0] == part)
        ordered += sorted(with_part, key=lambda pair: (pair[1] != loaded, -pair[1]))
    return tuple(ordered)


# %rax A, %rcx B, %r8 accumulators, %r9 steps left, %rdx next piece of B, %r11 bytes per tile row.
_A_TILES, _B_TILES = ("%tmm4", "%tmm5"), ("%tmm6", "%tmm7")


def _step_text(multiply: str, products: Pairs, at: int) -> list[str]:
    """Return one step of k; `at` is its distance, in steps, from the registers' addresses."""
    parts_a, parts_b = (max(pair[side] for pair in products) + 1 for side in (0, 1))
    lines, loaded = [], [-1, -1]
    prefetches = [PREFETCH_LINES * parts_b * at + i for i in range(PREFETCH_LINES * parts_b)]
    for i, j in products:
        if loaded[0] != i:
            offset = (at * parts_a + i) * 2048
            for t, tile in enumerate(_A_TILES):
                lines.append(f"tileloaddt1 {offset + 1024 * t}(%rax,%r11,1), {tile}")
        if loaded[1] != j:
            offset = (at * parts_b + j) * 2048
            for t, tile in enumerate(_B_TILES):
                lines.append(f"tileloadd {offset + 1024 * t}(%rcx,%r11,1), {tile}")
        loaded = [i, j]
        for acc in range(4):
            lines.append(f"{multiply} {_B_TILES[acc & 1]}, {_A_TILES[acc >> 1]}, %tmm{acc}")
            if prefetches:
                lines.append(f"prefetcht1 {64 * prefetches.pop(0)}(%rdx)")
    return lines


def _advance_text(products: Pairs, steps: int) -> list[str]:
    parts_a, parts_b = (max(pair[side] for pair in products) + 1 for side in (0, 1))
    return [
        f"addq $${2048 * parts_a * steps}, %rax",
        f"addq $${2048 * parts_b * steps}, %rcx",
        f"addq $${64 * PREFETCH_LINES * parts_b * steps}, %rdx",
    ]


def micro_kernel_text(multiply: str, products: Pairs) -> str:
    """Return the assembly of a micro-kernel, with the operands of `native.assembled`."""
    lines = ["movq $0, %rax", "movq $1, %rcx", "movq $2, %r8", "movq $3, %r9", "movq $5, %rdx"]
    lines += ["movq $$64, %r11", "testq $4, $4", "jz 2f"]
    lines += [f"tileloadd {1024 * t}(%r8,%r11,1), %tmm{t}" for t in range(4)]
    lines += ["jmp 3f", "2:"] + [f"tilezero %tmm{t}" for t in range(4)] + ["3:"]
    # An odd step first, because the loop is unrolled twice.
    lines += ["testq $$1, %r9", "jz 1f", *_step_text(multiply, products, 0)]
    lines += [*_advance_text(products, 1), "subq $$1, %r9", "jz 4f"]
    lines += ["1:", *_step_text(multiply, products, 0), *_step_text(multiply, products, 1)]
    lines += [*_advance_text(products, 2), "subq $$2, %r9", "jnz 1b", "4:"]
    lines += [f"tilestored %tmm{t}, {1024 * t}(%r8,%r11,1)" for t in range(4)]
    return "\n".join(lines)


_CLOBBERS = "~{rax},~{rcx},~{rdx},~{r8},~{r9},~{r11},~{memory},~{flags},~{dirflag},~{fpsr}"


@cache
def emit(name: str, products: Pairs) -> int:
    """Return the address of a micro-kernel for these products of parts."""
    multiply = "tdpbssd" if name == "amx_int8" else "tdpbf16ps"
    return assembled(f"{multiply} {products}", micro_kernel_text(multiply, in_tile_order(products)), _CLOBBERS)
