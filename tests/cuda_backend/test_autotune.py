"""Measured choices: the measurement, the cache of choices, and damage to it."""

import errno
import json
import os
import warnings

import ml_dtypes
import numpy as np
import pytest

import lowprec
from cuda_backend.cuda_reset import reset
from lowprec import errors
from lowprec.backends.cuda import autotune, compiling
from lowprec.core import executors
from software_cuda.descriptors import SoftwareLtError
from software_cuda.objects import EXECUTION_FAILED, INTERNAL_ERROR
from support import oracles

A = np.random.default_rng(0).integers(-3, 4, (64, 64)).astype(np.float16)
TRUE = oracles.product(A, A)


@pytest.fixture(autouse=True)
def short_measurements(software, cache, monkeypatch):
    """The software's clock is exact: a product or two per measurement are enough. All algorithms run."""
    monkeypatch.setattr(autotune, "_MEASUREMENT_MS", 0.04)
    software.software.switches.first_algorithm = False


def restart():
    """Forget all that a new process would not have."""
    executors.clear_caches()
    reset()


def chosen(x):
    return dict(lowprec.plan(x, x).algorithm)["algorithm"]


def entries(cache):
    devices = json.loads((cache / "autotune.json").read_text())["devices"]
    (found,) = devices.values()
    return found


def test_the_fastest_runs_from_now_on_and_in_the_next_process(software, cache):
    x = software.put(A)
    first = chosen(x)
    found = lowprec.autotune(x, x)
    assert found.timed[0].rank != 0
    assert found.speedup > 1
    assert found.timed[0].algorithm == chosen(x) != first
    np.testing.assert_array_equal(software.get(lowprec.matmul(x, x)), TRUE)
    restart()
    assert chosen(x) == found.timed[0].algorithm
    (key,) = entries(cache)
    assert "COMPUTE_32F" in key
    assert "float16 64x64" in key


def test_a_choice_for_fp8_is_one_with_scales(software, cache):
    """The fastest algorithm may be another one with scales (openxla/xla issue 40747)."""
    for dtype in (ml_dtypes.float8_e4m3fn, np.float16):
        x = software.put(A.astype(dtype))
        assert lowprec.autotune(x, x, candidates=2).timed
    assert {"float8" in key: key.endswith(", scales") for key in entries(cache)} == {
        True: True,
        False: False,
    }


def test_without_a_cache_a_choice_lasts_for_the_process(software, cache, monkeypatch):
    """Of two products, so that the second choice does not forget the first; kernels are compiled on the way, too."""

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(errors, "_given", set())
    compiling._load.cache_clear()
    x, y = software.put(A), software.put(A[:32, :32])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = chosen(x)
        found = [lowprec.autotune(z, z).timed[0].algorithm for z in (x, y)]
        z = software.put(A.astype(np.float32))
        np.testing.assert_array_equal(software.get(lowprec.matmul(z, z, math_mode="bf16")), TRUE)
    assert [x.category for x in caught] == [lowprec.LowprecWarning]
    executors.clear_caches()
    assert [chosen(x), chosen(y)] == found
    assert found[0] != first


def test_the_first_choice_is_kept_if_none_is_faster(software):
    x = software.put(A)
    software.same_speed()
    found = lowprec.autotune(x, x)
    assert (found.timed[0].rank, found.speedup) == (0, 1.0)


def test_arrays_of_the_caller_are_not_written(software):
    x, c = software.put(A), software.put(A)
    out = software.put(np.full((64, 64), 7, np.float16))
    lowprec.autotune(x, x, out=out, c=c, beta=2.0)
    np.testing.assert_array_equal(software.get(out), 7)
    np.testing.assert_array_equal(software.get(c), A)
    np.testing.assert_array_equal(software.get(x), A)


def test_progress_and_the_number_of_candidates(software):
    x, seen = software.put(A), []
    found = lowprec.autotune(x, x, candidates=2, progress=lambda done, of: seen.append((done, of)))
    assert len(found.timed) == 2
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]


def test_choices_of_another_machine_are_not_used(software, cache):
    x = software.put(A)
    first = chosen(x)
    lowprec.autotune(x, x)
    path = cache / "autotune.json"
    path.write_text(path.read_text().replace("cuBLAS ", "cuBLAS 9"))
    restart()
    assert chosen(x) == first


#: The text of the file, or what becomes of the choice of each product.
DAMAGE = [
    "{", "[1]", '{"devices": []}', '{"devices": {"GPU": 5}}', "[" * 100_000,
    {"algorithm": "zz"}, {"algorithm": "00" * 64}, {"algorithm": None}, {}, None,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda x: str(x)[:30])
def test_damaged_choices_count_as_none(software, cache, damage):
    x, path = software.put(A), cache / "autotune.json"
    first = chosen(x)
    lowprec.autotune(x, x, candidates=2)
    if isinstance(damage, str):
        path.write_text(damage)
    else:
        ((device, choices),) = json.loads(path.read_text())["devices"].items()
        path.write_text(json.dumps({"devices": {device: dict.fromkeys(choices, damage)}}))
    restart()
    assert chosen(x) == first
    np.testing.assert_array_equal(software.get(lowprec.matmul(x, x)), TRUE)
    assert lowprec.autotune(x, x, candidates=2).timed
    (choice,) = entries(cache).values()
    assert len(bytes.fromhex(choice["algorithm"])) == 64  # a choice again


def test_other_processes_choices_are_kept(software, cache):
    x = software.put(A)
    lowprec.autotune(x, x)
    path = cache / "autotune.json"
    stored = json.loads(path.read_text())
    stored["devices"]["another GPU"] = {"a product": {"algorithm": "00"}}
    path.write_text(json.dumps(stored))
    y = software.put(A[:32, :32].copy())
    lowprec.autotune(y, y)
    devices = json.loads(path.read_text())["devices"]
    assert devices["another GPU"] == {"a product": {"algorithm": "00"}}
    assert sorted(map(len, devices.values())) == [1, 2]


def test_candidates_that_do_not_run_are_passed_over(software):
    software.software.switches.first_algorithm = True
    x = software.put(A)
    # The third call is the third candidate's first.
    with software.failing_call("cublas_lt.matmul", at=4):
        found = lowprec.autotune(x, x)
    software.forgive()
    assert len(found.timed) >= 2
    assert min(timed.rank for timed in found.timed) == 1
    np.testing.assert_array_equal(software.get(lowprec.matmul(x, x)), TRUE)


def test_if_no_candidate_runs_the_first_error_is_reported(software, monkeypatch):
    def fail(*_):
        raise SoftwareLtError(INTERNAL_ERROR)

    monkeypatch.setattr(software.software.cublas_lt, "matmul", fail, raising=False)
    x = software.put(A)
    ill = r"none of the measured algorithms runs: .*INTERNAL_ERROR \(14\)"
    with pytest.raises(lowprec.BackendError, match=ill):
        lowprec.autotune(x, x, candidates=1)
    with pytest.raises(lowprec.UnsupportedError, match=r"INTERNAL_ERROR \(14\)"):
        lowprec.matmul(x, x)


def test_a_lost_device_ends_the_measurements(software, monkeypatch):
    """Every later call of CUDA fails, whichever algorithm is next."""
    runtime, tried = software.software.runtime, []

    def lose_the_device(*_):
        tried.append(None)
        runtime.sticky[0] = runtime.cudaError_t.cudaErrorIllegalAddress
        raise SoftwareLtError(EXECUTION_FAILED)

    monkeypatch.setattr(software.software.cublas_lt, "matmul", lose_the_device, raising=False)
    x = software.put(A)
    with pytest.raises(
        lowprec.BackendError, match="cudaStreamIsCapturing failed with cudaErrorIllegalAddress"
    ):
        lowprec.autotune(x, x)
    assert len(tried) == 1
    # before the measurements, and in the first one
    assert software.software.count("cuLaunchKernel") == 2
    software.forgive()


def test_after_a_failure_the_old_choice_is_used(software):
    x = software.put(A)
    first = chosen(x)
    with (
        software.failing_call("runtime.cudaEventElapsedTime", at=9),
        pytest.raises(lowprec.BackendError, match="cudaEventElapsedTime failed"),
    ):
        # Two measurements of each candidate come first; those that fail there are passed over.
        lowprec.autotune(x, x, candidates=3)
    software.forgive()
    assert chosen(x) == first
    np.testing.assert_array_equal(software.get(lowprec.matmul(x, x)), TRUE)
