"""``MasterWeights`` and ``PrecisionSchedule``."""

import copy
import math

import numpy as np
import pytest

from lowprec import ArrayError, LowprecError, MathMode, ShapeError, get_math_mode
from lowprec.amp import LossScaler, MasterWeights, Policy, PrecisionSchedule, SettingError
from lowprec.arrays.namespaces import dtype_name


def descent(masters, grads):
    return {
        "layers": [w - 1e-4 * g for w, g in zip(masters["layers"], grads["layers"], strict=True)]
    }


def test_small_updates_add_up(xp):
    one = xp.asarray(np.ones(3, np.float32))
    weights = MasterWeights({"layers": [one, one]}, "O2")
    grads = {"layers": [xp.asarray(np.ones(3, np.float16))] * 2}
    for _ in range(10):
        params = weights.update(descent, grads)
    exact = np.float32(1)
    for _ in range(10):
        exact -= np.float32(1e-4)
    for master, param in zip(weights.masters["layers"], params["layers"], strict=True):
        assert (dtype_name(master), dtype_name(param)) == ("float32", "float16")
        np.testing.assert_array_equal(xp.to_numpy(master), exact)
        np.testing.assert_array_equal(xp.to_numpy(param), np.float16(exact))
    alone = np.ones(3, np.float16)
    for _ in range(10):
        alone -= np.float16(1e-4) * np.float16(1)
    assert (alone == 1).all(), "without masters nothing moves"
    assert (xp.to_numpy(one) == 1).all(), "the caller's array is not written"


def test_a_rule_may_write_in_place():
    weights = MasterWeights({"w": np.ones(2, np.float16)}, "O3")

    def rule(masters, grads, rate):
        assert grads["w"].dtype == np.float32
        masters["w"] -= rate * grads["w"]

    found = weights.update(rule, {"w": np.ones(2, np.float16)}, rate=0.5)
    assert (weights.masters["w"] == 0.5).all()
    assert (found["w"] == np.float16(0.5)).all()


def test_norms_and_other_types_keep_theirs():
    params = {
        "norm": np.ones(2, np.float32),
        "w": np.ones(2, np.float32),
        "exact": np.ones(1),
        "steps": np.ones(1, np.int32),
    }
    weights = MasterWeights(params, Policy.preset("O2", half="bfloat16"))
    types = {name: x.dtype.name for name, x in weights.params.items()}
    assert types == {"norm": "float32", "w": "bfloat16", "exact": "float64", "steps": "int32"}
    assert {x.dtype.name for x in weights.masters.values()} == {"float32", "float64", "int32"}


def test_a_rule_that_fails_changes_nothing():
    weights = MasterWeights({"w": np.ones(2, np.float32)})
    before = weights.params
    with pytest.raises(ShapeError, match=r"of shape \(2,\) cannot become one of \(3,\)"):
        weights.update(lambda masters, grads: {"w": np.ones(3, np.float32)}, {"w": None})
    with pytest.raises(ShapeError, match="different structures"):
        weights.update(lambda masters, grads: {"v": masters["w"]}, {"w": None})
    assert weights.params is before
    with pytest.raises(ArrayError, match="expected arrays in lists"):
        MasterWeights({"w": "x"})


def test_a_training_with_a_scaler_goes_on_from_a_checkpoint(xp):
    rng = np.random.default_rng(0)
    steps = [xp.asarray(rng.standard_normal(4).astype(np.float16)) for _ in range(6)]

    def rule(masters, grads):
        return [w - 0.1 * g for w, g in zip(masters, grads, strict=True)]

    def train(weights, scaler, grads):
        for g in grads:
            scaled = scaler.scale([g])
            unscaled = scaler.unscale(weights.widened(scaled))
            scaler.step(weights.update, rule, unscaled)
            scaler.update()

    start = xp.asarray(np.ones(4, np.float32))
    whole, scaler = MasterWeights([start]), LossScaler(8.0, growth_interval=2)
    train(whole, scaler, steps[:3])
    state = copy.deepcopy(whole.state_dict(scaler))
    train(whole, scaler, steps[3:])
    resumed, other = MasterWeights([start], "O3"), LossScaler()
    resumed.load_state_dict(state, other)
    train(resumed, other, steps[3:])
    assert resumed.policy == whole.policy
    assert other.state_dict() == scaler.state_dict()
    np.testing.assert_array_equal(xp.to_numpy(resumed.masters[0]), xp.to_numpy(whole.masters[0]))


def test_a_damaged_checkpoint_changes_nothing():
    weights, scaler = MasterWeights([np.ones(2, np.float32)]), LossScaler()
    state = weights.state_dict(scaler)
    with pytest.raises(SettingError, match="the checkpoint must be a mapping, got None"):
        weights.load_state_dict(None)
    with pytest.raises(SettingError, match="the checkpoint lacks scaler"):
        weights.load_state_dict(weights.state_dict(), scaler)
    with pytest.raises(ShapeError, match=r"cannot become one of \(3,\)"):
        weights.load_state_dict({**state, "masters": [np.ones(3, np.float32)]})
    changed = {"masters": [np.zeros(2, np.float32)], "scaler": {**state["scaler"], "scale": -1}}
    with pytest.raises(SettingError, match="scale must be a number from 0 on"):
        weights.load_state_dict({**state, **changed}, scaler)
    assert (weights.masters[0] == 1).all()


def test_a_checkpoint_holds_copies():
    weights = MasterWeights([np.ones(2, np.float32)])
    state = weights.state_dict()
    weights.masters[0][:] = 5
    assert (state["masters"][0] == 1).all()
    weights.load_state_dict(state)
    weights.masters[0][:] = 7
    assert (state["masters"][0] == 1).all()


def test_modes_change_at_steps():
    schedule = PrecisionSchedule(["bf16", MathMode.BF16X3, "fp32"], at=[2, 5])
    seen = []
    for _ in range(7):
        with schedule.scope():
            seen.append(str(get_math_mode()))
        schedule.update()
    assert seen == ["bf16"] * 2 + ["bf16x3"] * 3 + ["fp32"] * 2
    assert repr(schedule) == "PrecisionSchedule(fp32, stage 3 of 3)"


def test_modes_change_on_a_plateau():
    schedule = PrecisionSchedule(["bf16", "tf32", "fp32"], patience=2, threshold=0.1)
    losses = [5, 4, 3.9, 3.8, 2, float("nan"), 1.99, 1, 1, 1, 1, 1]
    seen = []
    for loss in losses:
        schedule.update(np.float32(loss))
        seen.append(str(schedule.mode))
    assert seen == ["bf16"] * 3 + ["tf32"] * 3 + ["fp32"] * 6


def test_a_schedule_goes_on_from_a_checkpoint():
    make = lambda: PrecisionSchedule(["bf16", "fp32"], patience=3)  # noqa: E731
    whole, other = make(), make()
    assert whole.state_dict()["lowest"] is None
    for loss in (1.0, 1.0, 1.0):
        whole.update(loss)
    other.load_state_dict(whole.state_dict())
    for schedule in (whole, other):
        schedule.update(1.0)
        assert schedule.mode is MathMode.FP32
    with pytest.raises(SettingError, match="stage 1 of a schedule of 1 modes"):
        PrecisionSchedule(["fp32"], at=[]).load_state_dict(whole.state_dict())
    with pytest.raises(SettingError, match="lacks steps, stage"):
        whole.load_state_dict({})
    with pytest.raises(SettingError, match="stage must be an integer of at least 0, got 'a'"):
        whole.load_state_dict({**whole.state_dict(), "stage": "a"})
    before = whole.state_dict()
    for lowest, words in (
        ("a", "lowest must be a number"),
        ([1], "lowest must be"),
        (math.nan, "is NaN"),
    ):
        with pytest.raises(SettingError, match=words):
            whole.load_state_dict({**before, "lowest": lowest})
    assert whole.state_dict() == before


@pytest.mark.parametrize("loss", ["a", [1.0], np.ones(2), 1j, None], ids=str)
def test_a_loss_is_a_number(loss):
    schedule = PrecisionSchedule(["bf16", "fp32"], patience=3)
    before = schedule.state_dict()
    with pytest.raises(
        SettingError, match=r"must be a number or an array without axes, got|call update\(loss\)"
    ):
        schedule.update(loss)
    assert schedule.state_dict() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"modes": ["bf16", "fp32"]}, "needs either at= or patience="),
        ({"modes": ["bf16", "fp32"], "at": [1], "patience": 1}, "pass one of them"),
        (
            {"modes": ["bf16", "fp32"], "at": [1, 2]},
            r"at must hold 1 increasing numbers of steps for 2",
        ),
        ({"modes": ["bf16", "tf32", "fp32"], "at": [2, 2]}, "at must hold 2 increasing numbers"),
        ({"modes": ["bf16"], "patience": 0}, "patience must be an integer of at least 1, got 0"),
        ({"modes": ["bf16"], "patience": 1, "threshold": 1.0}, "threshold must be a share"),
        ({"modes": ["bf16"], "patience": 1, "threshold": "a"}, "threshold must be a share"),
        (
            {"modes": ["bf16", "fp32"], "at": [1.5]},
            "a step of at must be an integer of at least 0, got 1.5",
        ),
        ({"modes": [], "at": []}, "the modes of a schedule must be a list, got"),
        ({"modes": "bf16", "at": []}, "the modes of a schedule must be a list, got 'bf16'"),
        ({"modes": ["fp23"], "at": []}, "'fp23' is not a math mode"),
    ],
)
def test_schedules_that_make_no_sense(arguments, message):
    with pytest.raises(LowprecError, match=message):
        PrecisionSchedule(**arguments)
