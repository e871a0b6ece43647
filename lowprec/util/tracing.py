"""Functions that PyTorch's compiler calls outside its graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np

F = TypeVar("F", bound=Callable[..., Any])


def is_traced(_: Any = None) -> bool:
    """Whether PyTorch's compiler traces the caller."""
    return False


is_traced._torchdynamo_inline = lambda _=None: True  # type: ignore[attr-defined]


def uncompiled(function: F) -> F:
    """Return a function that PyTorch's compiler does not trace, nor the functions that it calls."""

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        # frames that contain neither tensors nor NumPy are not traced, but those they call are
        if is_traced(np):
            from lowprec.util.untraced import call_untraced

            return call_untraced(function, *arguments, **keywords)
        return function(*arguments, **keywords)

    # The compiler limits the number of graphs of a code object.
    named: Any = call
    named.__code__ = named.__code__.replace(co_name=function.__name__)
    return cast(F, named)
