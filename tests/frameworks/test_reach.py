"""The reach of a guard where PyTorch decides it: backward passes, autocast, forked processes and data loaders."""

import sys

import pytest

import lowprec
from support.programs import run_python


@pytest.fixture
def reached(torch):
    """Return a function: whether lowprec and PyTorch are at full FP32 where it is called."""
    torch.set_float32_matmul_precision("medium")
    lowprec.set_math_mode("bf16")
    yield lambda: (lowprec.get_math_mode() == "fp32", torch.get_float32_matmul_precision() == "highest")
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
