"""``autotune`` without a choice, and its results as text."""

import numpy as np
import pytest

import lowprec
from lowprec.backends import AlgorithmTiming
from lowprec.tuning import AutotuneResult

A = np.ones((8, 8), np.float32)


def test_a_cpu_leaves_nothing_to_choose():
    found = lowprec.autotune(A, A, math_mode="bf16")
    assert (found.timed, found.speedup) == ((), 1.0)
    assert "nothing to choose" in str(found)
    assert "float32 (8, 8) @ float32 (8, 8)" in str(found)


@pytest.mark.parametrize("candidates", [0, 257, -1, True, "x", None, 1.5])
def test_the_number_of_candidates_is_checked(candidates):
    error = lowprec.SettingError if isinstance(candidates, int) else TypeError
    with pytest.raises(error, match=r"candidates must be from 1 to 256|integer"):
        lowprec.autotune(A, A, candidates=candidates)


def test_the_table_puts_the_choice_first_and_compares_with_the_library_s_own():
    ranked = ((3, 0.8, "id 9"), (0, 1.0, "id 1"), (1, 2.0, "id 2"))
    timed = tuple(AlgorithmTiming(*row) for row in ranked)
    found = AutotuneResult("a product", "cuda:0: a GPU", timed)
    assert found.speedup == pytest.approx(1.25)
    lines = str(found).splitlines()
    assert lines[0] == "a product on cuda:0: a GPU"
    assert lines[2].split() == ["3", "0.800", "id", "9", "(chosen)"]
    assert lines[3].split() == ["0", "1.000", "id", "1"]


def test_a_profile_does_not_see_tuning():
    with lowprec.profile() as profile:
        lowprec.autotune(A, A)
    assert len(profile.records) == 0
