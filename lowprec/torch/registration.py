"""Kernels in PyTorch's dispatcher, in front of its own: registered by a block, and removed once they are idle."""

from __future__ import annotations

import ctypes
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from contextvars import copy_context
from typing import Any

import torch
from torch.autograd import graph

from lowprec.torch.aten import Kernel
from lowprec.util.lock import lock

Function = Callable[..., Any]

#: By the function that makes the kernels. A library that is not referenced removes its kernels.
_libraries: dict[Function, tuple[torch.library.Library, ...]] = {}
#: Calls of kernels since the last block.
_idle_calls = 0
#: Number of them after which the kernels are removed. Registering again takes as long as one or two thousand of them.
_MOST_IDLE_CALLS = 1000


def register(rows: Iterable[Kernel], make: Callable[[Kernel, Function], Function]) -> None:
    """Put kernels in front of PyTorch's own, if they are not; ``make`` returns each from its row and PyTorch's."""
    global _idle_calls
    _idle_calls = 0
    if make in _libraries:
        return
    with lock:
        if make not in _libraries:
            _libraries[make] = _registered(rows, make)


def _registered(rows: Iterable[Kernel], make: Function) -> tuple[torch.library.Library, ...]:
    # PyTorch warns once per process. `catch_warnings` would replace the filters of other threads.
    warnings.filterwarnings(
        "ignore", r"\s*Warning only once for all operators, .*overrid", UserWarning
    )
    made: dict[str, torch.library.Library] = {}
    for kernel in rows:
        space, _, name = kernel.operator.partition("::")
        library = made.get(space) or made.setdefault(space, torch.library.Library(space, "IMPL"))
        key = torch._C._dispatch_key_parse(kernel.key)  # which knows MkldnnCPU, too
        own = torch.library.get_kernel(kernel.operator, key).call_boxed
        replacement = make(kernel, own)
        untraced(replacement)
        library.impl(name, replacement, kernel.key, with_keyset=True, allow_override=True)
    return tuple(made.values())


def count_idle_call() -> None:
    """Remove the kernels after many calls outside of blocks, if no other thread can be in a product meanwhile."""
    global _idle_calls
    _idle_calls += 1
    if _idle_calls >= _MOST_IDLE_CALLS:
        _idle_calls = 0
        if threading.active_count() == 1 and torch._C._current_graph_task_id() == -1:
            _remove()


def _remove() -> None:
    global _libraries
    with lock:
        removed = _libraries
        _libraries = {}
        for libraries in removed.values():
            for library in libraries:
                library._destroy()


def share_contexts() -> None:
    """Give the threads of backward passes the caller's context, as PyTorch does from 2.13 on; a GPU has one."""
    run = graph._engine_run_backward
    if "_stash_obj_in_tls" in run.__code__.co_names:
        return

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        context = copy_context()
        count = sys.getrefcount(context)
        torch._C._stash_obj_in_tls("context", context)
        if sys.getrefcount(context) == count:  # PyTorch 2.11 takes the caller's reference
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(context))
        return run(*args, **kwargs)

    for module in (graph, torch.autograd):
        module._engine_run_backward = run_backward


def untraced(function: Function) -> None:
    """Exclude a function, and those that it calls, from PyTorch's compiler, without importing it."""
    compiler: Any = torch._C._dynamo.eval_frame
    skip = compiler._FrameAction.SKIP
    compiler.set_code_exec_strategy(function.__code__, compiler._FrameExecStrategy(skip, skip))
