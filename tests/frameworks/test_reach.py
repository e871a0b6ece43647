"""The reach of a guard over threads, tasks and processes: the table in its documentation, row by row."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import lowprec
from support.programs import run_python

Reached = tuple[bool, bool, bool]
EVERYTHING, NOTHING = (True, True, True), (False, False, False)


@pytest.fixture
def reached(torch: Any, jax: Any) -> Iterator[Callable[[], Reached]]:
    """Return a function: whether lowprec, JAX and PyTorch are at full FP32 where it is called."""
    torch.set_float32_matmul_precision("medium")
    lowprec.set_math_mode("bf16")

    def look() -> Reached:
        return (
            lowprec.get_math_mode() == "fp32",
            jax.config.jax_default_matmul_precision == "highest",
            torch.get_float32_matmul_precision() == "highest",
        )

    assert look() == NOTHING
    yield look
    assert look() == NOTHING
    lowprec.set_math_mode(None)
    torch.set_float32_matmul_precision("highest")


def test_threads(reached: Callable[[], Reached]) -> None:
    found: list[Reached] = []
    with ThreadPoolExecutor(1) as pool, lowprec.fp32_guard() as guard:
        assert reached() == EVERYTHING
        thread = threading.Thread(target=lambda: found.append(reached()))
        thread.start()
        thread.join()
        assert found == [(False, False, True)]
        assert pool.submit(reached).result() == (False, False, True)
        assert pool.submit(guard.wrap(reached)).result() == EVERYTHING


def test_asyncio(reached: Callable[[], Reached]) -> None:
    async def look(go: asyncio.Event) -> Reached:
        await go.wait()
        return reached()

    async def main() -> list[Reached]:
        go = asyncio.Event()
        before = asyncio.create_task(look(go))
        await asyncio.sleep(0)
        with lowprec.fp32_guard() as guard:
            inside = asyncio.create_task(look(go))
            go.set()
            return [
                await before,
                await inside,
                await asyncio.to_thread(reached),
                await asyncio.get_running_loop().run_in_executor(None, reached),
                await asyncio.to_thread(guard.wrap(reached)),
            ]

    before, inside, to_thread, in_executor, wrapped = asyncio.run(main())
    assert before == (False, True, True)
    assert inside == EVERYTHING
    assert to_thread == (True, False, True)
    assert in_executor == (False, False, True)
    assert wrapped == EVERYTHING


def test_generators(reached: Callable[[], Reached]) -> None:
    def open_block() -> Iterator[Reached]:
        with lowprec.fp32_guard():
            yield reached()

    @lowprec.fp32_guard()
    def body_only() -> Iterator[Reached]:
        yield reached()

    for steps, consumer in ((open_block(), EVERYTHING), (body_only(), NOTHING)):
        assert next(steps) == EVERYTHING
        assert reached() == consumer
        steps.close()  # type: ignore[attr-defined]


def test_a_backward_pass(torch: Any, reached: Callable[[], Reached]) -> None:
    seen: list[Reached] = []
    x = torch.ones(4, 4, requires_grad=True)
    x.register_hook(lambda _: seen.append(reached()))
    with lowprec.fp32_guard():
        inside, after = (x @ x).sum(), (x @ x).sum()
        inside.backward()
    after.backward()
    assert seen == [EVERYTHING, NOTHING]


@pytest.mark.usefixtures("reached")
def test_autocast(torch: Any) -> None:
    a = torch.ones(4, 4)
    with lowprec.fp32_guard(), torch.autocast("cpu", torch.bfloat16):
        assert (a @ a).dtype is torch.bfloat16
        assert lowprec.matmul(a, a).dtype is torch.float32


_PROCESSES = """
import multiprocessing, warnings
from concurrent.futures import ProcessPoolExecutor
warnings.simplefilter("ignore")  # libraries advise against forking with threads
import torch
import lowprec

def look(*_):
    return lowprec.get_math_mode() == "fp32", torch.get_float32_matmul_precision() == "highest"

class Looks(torch.utils.data.Dataset):
    def __len__(self):
        return 1
    __getitem__ = look

def put(queue):
    queue.put(look())

@lowprec.fp32_guard()
def wrapped():
    return look()

torch.set_float32_matmul_precision("medium")
lowprec.set_math_mode("bf16")
fork = multiprocessing.get_context("fork")
with ProcessPoolExecutor(1, mp_context=fork) as pool:
    pool.submit(look).result()
    with lowprec.fp32_guard():
        queue = fork.Queue()
        process = fork.Process(target=put, args=(queue,))
        process.start()
        print("forked", queue.get())
        process.join()
        loader = torch.utils.data.DataLoader(
            Looks(), num_workers=1, multiprocessing_context=fork, collate_fn=list
        )
        print("loader", *next(iter(loader)))
        print("before", pool.submit(look).result())
        print("wrapped", pool.submit(wrapped).result())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes are not forked")
@pytest.mark.usefixtures("torch")
def test_processes() -> None:
    assert run_python(_PROCESSES).splitlines() == [
        "forked (True, True)",
        "loader (True, True)",
        "before (False, False)",
        "wrapped (True, True)",
    ]
