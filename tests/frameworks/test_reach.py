"""The reach of a guard where PyTorch decides it, and that of interceptions in tasks and threads that outlive them."""

import asyncio
import contextvars
import importlib
import inspect
import sys
import threading

import pytest

import lowprec
from support.programs import run_python


@pytest.fixture
def reached(torch):
    """Return a function: whether lowprec and PyTorch are at full FP32 where it is called."""
    torch.set_float32_matmul_precision("medium")
    lowprec.set_math_mode("bf16")
    yield lambda: (
        lowprec.get_math_mode() == "fp32",
        torch.get_float32_matmul_precision() == "highest",
    )
    lowprec.set_math_mode(None)
    torch.set_float32_matmul_precision("highest")


def test_a_backward_pass(torch, reached):
    seen = []
    x = torch.ones(4, 4, requires_grad=True)
    x.register_hook(lambda _: seen.append(reached()))
    with lowprec.fp32_guard():
        inside, after = (x @ x).sum(), (x @ x).sum()
        inside.backward()
    after.backward()
    assert seen == [(True, True), (False, False)]


@pytest.mark.usefixtures("reached")
def test_autocast(torch):
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
def test_processes():
    assert run_python(_PROCESSES).splitlines() == [
        "forked (True, True)",
        "loader (True, True)",
        "before (False, False)",
        "wrapped (True, True)",
    ]


#: Rounds to 1 in bfloat16.
ABOVE = 1 + 2.0**-9


@pytest.fixture(params=["numpy", "torch", "jax"])
def library(request):
    """Return ``intercept``, and a function: whether a product is in bfloat16."""
    is_rounded = rounds(request.param)
    return importlib.import_module(f"lowprec.{request.param}").intercept, is_rounded


def rounds(library):
    xp = pytest.importorskip({"jax": "jax.numpy"}.get(library, library))
    rows = iter(range(3, 99))  # JAX counts a product of each shape when it compiles it

    def is_rounded():
        x = xp.full((next(rows), 4), ABOVE, dtype=xp.float32)
        return float((x @ x.T)[0, 0]) == 4

    return is_rounded


# NumPy's blocks are those of a thread
@pytest.mark.parametrize("library", ["torch", "jax"], indirect=True)
def test_a_task_outlives_the_interception_in_which_it_began(library):
    intercept, is_rounded = library
    found = []

    async def server(turn):
        for _ in range(3):
            await turn.acquire()
            with intercept("fp32"):
                pass
            found.append(is_rounded())

    async def main():
        turn = asyncio.Semaphore(0)
        with intercept("bf16") as seen:
            task = asyncio.create_task(server(turn))
            await asyncio.sleep(0)
            is_rounded()
        before = sum(p.count for p in seen.report().products)
        for other in ("fp32", "bf16", "bf16"):
            with intercept(other):
                turn.release()
                if other == "bf16":
                    await asyncio.sleep(0)
            await asyncio.sleep(0)
        await task
        return sum(p.count for p in seen.report().products) - before

    assert asyncio.run(main()) == 0
    assert not any(found)


def test_a_thread_that_inherits_the_context_of_an_interception(library):
    """As threads do from Python 3.14 on with -X thread_inherit_context=1."""
    intercept, is_rounded = library
    ended, found = threading.Event(), []

    def work():
        ended.wait(10)
        with intercept("tf32"):
            pass
        found.append(is_rounded())

    with intercept("bf16") as seen:
        thread = threading.Thread(target=contextvars.copy_context().run, args=(work,))
        thread.start()
    with intercept("bf16"):
        ended.set()
        thread.join()
    assert found == [False]
    assert seen.report().products == ()


def test_an_interception_that_is_not_used_warns_with_its_line(library, recwarn):
    intercept, _ = library
    intercept("bf16")
    (warning,) = (w for w in recwarn.list if w.category is lowprec.LowprecWarning)
    assert (warning.filename, warning.lineno) == (__file__, inspect.currentframe().f_lineno - 2)
    assert str(warning.message).startswith("the scope was made and not used")
    intercept("bf16")(print)
    with intercept("bf16"):
        pass
    assert len([w for w in recwarn.list if w.category is lowprec.LowprecWarning]) == 1


def test_one_block_for_all_libraries():
    is_rounded = {name: rounds(name) for name in ("numpy", "torch", "jax")}
    sys.modules["jax"].clear_caches()  # products that are compiled are not counted again
    seen = lowprec.intercept({"no such layer": "fp32", "*": "bf16"})
    for _ in range(2):
        with seen:
            assert [name for name, is_ in is_rounded.items() if is_()] == list(is_rounded)
        assert not any(is_() for is_ in is_rounded.values())
    assert len({p.operator for p in seen.report().taken}) == 3
    assert "lowprec.intercept({'no such layer': 'fp32', '*': 'bf16'}): " in str(seen)
    with lowprec.intercept("bf16", ["torch"]):
        assert [name for name, is_ in is_rounded.items() if is_()] == ["torch"]


def test_libraries_that_are_not_intercepted_are_reported():
    is_rounded = {name: rounds(name) for name in ("torch", "jax")}
    with pytest.raises(
        lowprec.SettingError, match="libraries: choose among torch, jax, numpy, got 'tensorflow'"
    ):
        lowprec.intercept("bf16", ["torch", "tensorflow"])
    with lowprec.intercept({"layer": "bf16"}) as seen:
        assert not any(is_() for is_ in is_rounded.values())
    reasons = {x.partition(" ")[0]: x for x in seen.report().remarks}
    assert "no rule for a routine" in reasons["numpy's"]
    with pytest.raises(lowprec.UnsupportedError, match="no rule for a routine"):  # noqa: SIM117 - at the entry
        with lowprec.intercept({"layer": "bf16"}, ["torch", "numpy"]):
            pass
    assert not lowprec.torch.intercept._holders
