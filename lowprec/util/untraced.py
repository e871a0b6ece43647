"""Calls outside graphs of PyTorch's compiler; this module is imported where one is traced."""

from __future__ import annotations

from typing import Any

import torch


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="lowprec.matmul is in no graph with out=, k_chunk= or scales, operands that are no tensors, or factors that "
    "are not Python numbers; functions of lowprec that return no product are in none"
)
def call_untraced(function: Any, /, *arguments: Any, **keywords: Any) -> Any:
    return function(*arguments, **keywords)
