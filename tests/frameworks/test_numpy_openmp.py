"""OpenMP workers that ran before a block are part of it, with a stand-in for LLVM's runtime or with a real one."""

import ctypes
import os
import sys

import numpy as np
import pytest

import lowprec.numpy as ln
from lowprec.backends.cpu import library
from support.native import compiled, openblas

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or library.library() is None,
    reason="interception needs Linux and the compiled kernels",
)

#: One worker, created at the first call, that runs each parallel region next to the calling thread.
RUNTIME = """
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
typedef void Microtask(int*, int*, void*, void*, void*);
static sem_t begin, end;
static Microtask* work;
static void* words[3];
static void* loop(void*) {
    for (int one = 1;;) {
        sem_wait(&begin);
        work(&one, &one, words[0], words[1], words[2]);
        sem_post(&end);
    }
}
extern "C" void __kmpc_fork_call(void*, int size, Microtask* function, ...) {
    static pthread_t thread;
    if (!thread) {
        sem_init(&begin, 0, 0);
        sem_init(&end, 0, 0);
        pthread_create(&thread, 0, loop, 0);
    }
    va_list all;
    va_start(all, function);
    for (int i = 0; i < size; i++) words[i] = va_arg(all, void*);
    va_end(all);
    work = function;
    sem_post(&begin);
    int zero = 0;
    function(&zero, &zero, words[0], words[1], words[2]);
    sem_wait(&end);
}
"""
#: As compilers translate a parallel region of three shared variables: each of two threads multiplies x by 1.
REGION = """
#include <stdint.h>
typedef void Microtask(int*, int*, ...);
extern "C" void __kmpc_fork_call(const void*, int, Microtask*, ...);
extern "C" void scipy_cblas_sgemm64_(int, int, int, int64_t, int64_t, int64_t, float, const float*, int64_t,
                                     const float*, int64_t, float, float*, int64_t);
static void region(int*, int* thread, float* x, float* one, float* found) {
    scipy_cblas_sgemm64_(101, 111, 111, 1, 1, 1, 1, x, 1, one, 1, 0, found + *thread % 2, 1);
}
extern "C" void products(float* x, float* one, float* found) {
    static const struct { int reserved, flags, more[2]; const char* source; } location = {0, 2, {0, 0}, ";x;x;1;1;;"};
    __kmpc_fork_call(&location, 3, (Microtask*)region, x, one, found);
}
"""


def test_workers_of_llvm_carry_the_scope(tmp_path):
    path = openblas("numpy")
    (tmp_path / "runtime.cpp").write_text(RUNTIME)
    (tmp_path / "region.cpp").write_text(REGION)
    shared = ["-shared", "-fPIC", "-pthread"]
    runtime = os.environ.get("LOWPREC_TEST_OPENMP")
    runtime = runtime or str(
        compiled(tmp_path, tmp_path / "runtime.cpp", *shared, name="libruntime.so")
    )
    needed = [
        runtime,
        f"-Wl,-rpath,{os.path.dirname(runtime)}",
        str(path),
        f"-Wl,-rpath,{path.parent}",
    ]
    region = ctypes.CDLL(
        str(compiled(tmp_path, tmp_path / "region.cpp", *shared, *needed, name="libregion.so"))
    )
    x, one, found = np.float32([1 + 2.0**-9]), np.float32([1]), np.zeros(2, np.float32)

    def products():
        region.products(*(ctypes.c_void_p(each.ctypes.data) for each in (x, one, found)))
        return found.tolist()

    assert products() == [x[0]] * 2
    with ln.intercept("bf16") as seen:
        assert products() == [1, 1]
        with ln.intercept("tf32"):
            assert products() == [x[0]] * 2
    assert products() == [x[0]] * 2
    assert sum(p.count for p in seen.report().taken) == 2
    assert not seen.report().passed
