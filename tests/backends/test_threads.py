"""The threads that share a product, and how many of them there are."""

import ctypes
import os
import sys
import threading
import time

import pytest
import threadpoolctl

import lowprec
from lowprec.backends.cpu import library, threads
from support.programs import in_threads, run_python

needs_library = pytest.mark.skipif(library.library() is None, reason="lowprec has no kernels")

_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)


def spread(count, workers):
    """Take `count` numbers with several threads; return the numbers, the threads, and their numbers."""
    numbers, taken, who, which = iter(range(count)), [], set(), set()

    def work(_, thread):
        who.add(threading.get_ident())
        which.add(thread)
        for i in numbers:
            taken.append(i)
            time.sleep(0.0005)

    callback = _WORK(work)
    library.functions().run(callback, None, workers)
    return taken, who, which


@needs_library
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_all_work_is_done_once(workers):
    taken, who, which = spread(200, workers)
    assert sorted(taken) == list(range(200))
    assert threading.get_ident() in who
    assert len(who) == len(which) <= workers
    assert which <= set(range(workers))


@needs_library
def test_workers_take_part():
    # A worker may come too late for one job, but not for twenty in a row of 50 ms each.
    assert any(len(spread(200, 2)[1]) == 2 for _ in range(20))


@needs_library
def test_many_concurrent_callers():
    results = in_threads(8, lambda _: spread(40, 3)[0])
    assert [sorted(taken) for taken in results] == [list(range(40))] * 8


@needs_library
@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or (os.cpu_count() or 1) < 2, reason="one CPU, or no masks"
)
def test_workers_run_on_the_cpus_of_their_caller_and_after_a_fork():
    code = """
        import ctypes, os, threading
        from lowprec.backends.cpu import library

        work_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)
        def masks():
            found, came = {}, threading.Event()
            def work(_, thread):
                found[threading.get_ident()] = os.sched_getaffinity(0)
                came.set() if len(found) == 2 else came.wait(10)
            callback = work_type(work)
            library.functions().run(callback, None, 2)
            return list(found.values())

        all_cpus = os.sched_getaffinity(0)
        assert masks() == [all_cpus, all_cpus]
        child = os.fork()
        if child == 0:
            os._exit(0 if masks() == [all_cpus, all_cpus] else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        one = {max(all_cpus)}
        os.sched_setaffinity(0, one)
        print(masks() == [one, one])
    """
    assert run_python(code) == "True"


@needs_library
def test_exit_is_quiet_while_workers_sleep_or_work():
    code = """
        import threading, time
        import numpy as np
        import lowprec
        a = np.ones((1500, 1500), np.float32)
        lowprec.matmul(a, a)
        def multiply():
            while True:
                lowprec.matmul(a, a)
        threading.Thread(target=multiply, daemon=True).start()
        time.sleep(0.05)
        print("end")
    """
    assert run_python(code) == "end"


def test_threadpoolctl_acts_on_it():
    if threads.num_threads() == 1:
        pytest.skip("this machine has a single CPU, so that there is nothing to limit")
    before = threads.num_threads()
    with threadpoolctl.threadpool_limits(1):
        assert threads.num_threads() == 1
    assert threads.num_threads() == before


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="this machine has a single CPU")
def test_variables_of_blas_act_on_it():
    code = "import numpy; from lowprec.backends.cpu import threads; print(threads.num_threads())"
    assert run_python(code, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1") == "1"


@pytest.mark.parametrize("has_openblas", [True, False])
@pytest.mark.parametrize(
    ("variables", "limit"),
    [
        ({"OMP_NUM_THREADS": "3,2"}, 3),
        ({"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "5"}, 5),
        ({"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "no number"}, 64),
        ({"LOWPREC_NUM_THREADS": "7"}, 7),
    ],
)
def test_variables_of_threads(variables, limit, has_openblas, monkeypatch):
    """Variables of OpenBLAS are read where it is not found, as with MKL, Accelerate, and without `/proc`."""
    for name in (
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "LOWPREC_NUM_THREADS",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(threads, "affinity", lambda: 64)
    monkeypatch.setattr(threads, "_read", lambda path: "")
    monkeypatch.setattr(threads, "_openblas_getter", lambda: (lambda: 64) if has_openblas else None)
    monkeypatch.setattr(threads, "_limits", threads._Limits())
    is_own = "MKL_NUM_THREADS" in variables or "LOWPREC_NUM_THREADS" in variables
    assert threads.num_threads() == (64 if has_openblas and not is_own else limit)


@pytest.mark.parametrize("text", ["two", "0", "-1", "1.5"])
def test_an_illegal_number_of_threads_is_an_error(text, monkeypatch):
    monkeypatch.setenv("LOWPREC_NUM_THREADS", text)
    monkeypatch.setattr(threads, "_limits", threads._Limits())
    message = rf"LOWPREC_NUM_THREADS must be a positive number, got '{text}'"
    with pytest.raises(lowprec.EnvironmentVariableError, match=message):
        threads.num_threads()


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        ({"/sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3),
        ({"/proc/self/cgroup": "1:cpu:/x\n0::/a/b\n", "/sys/fs/cgroup/a/b/cpu.max": "200000 100000\n"}, 2),
        ({"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/cpu.max": "50000 100000\n",
          "/sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 1),
        ({"/proc/self/cgroup": "0::/a\n", "/sys/fs/cgroup/a/cpu.max": "max 100000\n"}, sys.maxsize),
        ({}, sys.maxsize),
    ],
)  # fmt: skip
def test_the_quotas_of_nested_control_groups(files, cpus, monkeypatch):
    monkeypatch.setattr(threads, "_read", lambda path: files.get(path, ""))
    assert threads._cgroup_cpus() == cpus


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or threads.num_threads() < 2, reason="one CPU, or no masks"
)
@pytest.mark.parametrize("pinned_first", [True, False])
def test_the_affinity_is_the_calling_threads(pinned_first, monkeypatch):
    """A pinned thread works alone and leaves others their CPUs."""
    free = threads.num_threads()
    monkeypatch.setattr(threads, "_limits", threads._Limits())
    found = []

    def pinned():
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        found.append(threads.num_threads())

    if not pinned_first:
        assert threads.num_threads() == free
    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join()
    assert found == [1]
    assert threads.num_threads() == free


@needs_library
@pytest.mark.skipif(os.name != "posix", reason="stacks of Windows grow")
def test_small_products_need_little_stack():
    code = """
        import threading
        import numpy as np
        import lowprec
        x = np.ones((16, 16), np.float32)
        def multiply():
            for mode in ("fp32", "bf16", "fp16", "fp16x3"):
                lowprec.matmul(x, x, math_mode=mode)
            print("end")
        multiply()
        threading.stack_size(32768)
        thread = threading.Thread(target=multiply)
        thread.start()
        thread.join()
    """
    assert run_python(code).split() == ["end", "end"]


@needs_library
def test_an_idle_process_uses_no_cpu_time():
    """Workers poll for 150 us; a fiftieth of the time is left to other threads of this process."""
    code = """
        import time
        import numpy as np
        import lowprec
        a = np.ones((512, 512), np.float32)
        for _ in range(50):
            lowprec.matmul(a, a, math_mode="bf16")
            lowprec.matmul(a, a)
        time.sleep(0.01)
        before = time.process_time()
        time.sleep(0.5)
        print(time.process_time() - before < 0.01)
    """
    assert run_python(code) == "True"


needs_openmp = pytest.mark.skipif(
    sys.platform != "linux" or threads.num_threads() < 2, reason="one CPU, or not Linux"
)


@needs_library
@needs_openmp
def test_products_run_on_the_threads_of_pytorch():
    """With the same bits as before; not in a forked child, and not with LOWPREC_THREADS=own."""
    pytest.importorskip("torch", reason="torch is not installed")
    code = """
        import os
        import numpy as np
        import lowprec
        from lowprec.backends.cpu import threads
        a = np.random.default_rng(1).standard_normal((512, 512), np.float32)
        b = np.arange(600 * 600, dtype=np.float64).reshape(600, 600) % 7
        modes = ("fp32", "tf32", "bf16", "bf16x6")
        before = [lowprec.matmul(a, a, math_mode=mode) for mode in modes]
        def same():
            return all(np.array_equal(lowprec.matmul(a, a, math_mode=m), x) for m, x in zip(modes, before))
        import torch
        torch.ones(600, 600) @ torch.ones(600, 600)
        assert same() and np.array_equal(lowprec.matmul(b, b), b.astype(int) @ b.astype(int))
        torch.set_num_threads(1)
        threads.num_threads()
        print(threads.description(), threads.num_threads())
        child = os.fork()
        if child == 0:
            os._exit(0 if same() else 3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        torch.set_num_threads(2)
        os.environ["LOWPREC_THREADS"], threads._limits = "own", threads._Limits()
        threads.num_threads()
        print(same(), threads.description())
    """
    found = run_python(code).split("\n")
    assert found == ["PyTorch's OpenMP threads 1", "0", "True lowprec's own workers"]


@needs_library
def test_an_illegal_choice_of_threads_is_an_error():
    code = """
        import os
        import numpy as np
        import lowprec
        from lowprec.backends.cpu import threads
        for value in ("two", "OWN", "1"):
            os.environ["LOWPREC_THREADS"], threads._limits = value, threads._Limits()
            lowprec.info()
            try:
                lowprec.matmul(np.ones((300, 300), np.float32), np.ones((300, 300), np.float32))
            except lowprec.EnvironmentVariableError as error:
                print(error)
    """
    lines = run_python(code).splitlines()
    for value, line in zip(("two", "OWN", "1"), lines, strict=True):
        assert f"LOWPREC_THREADS must be one of own, openmp, got '{value}'" in line
