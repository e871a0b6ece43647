"""``Policy``: levels, lists, casts of containers."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from lowprec import ArrayError, fp32_guard
from lowprec.amp import MasterWeights, Policy, SettingError, autocast
from lowprec.amp.policy import as_policy

#: apex's table: cast of the model, functions patched, norms in float32, masters, loss scale.
LEVELS = {
    "O0": ("float32", "float32", "float32", False, False, False, 1.0),
    "O1": ("float32", "float16", "float32", True, False, False, "dynamic"),
    "O2": ("float16", "float16", "float32", False, True, True, "dynamic"),
    "O3": ("float16", "float16", "float16", False, False, False, 1.0),
}


def properties(policy):
    return (
        policy.params, policy.compute, policy.output, policy.functions, policy.norms_float32,
        policy.masters, policy.loss_scale,
    )  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
def test_the_levels_are_apexs(level):
    assert properties(Policy.preset(level)) == LEVELS[level]
    assert as_policy(level) == Policy.preset(level)


def test_another_narrow_type():
    found = Policy.preset("O2", half="bfloat16")
    expected = ("bfloat16", "bfloat16", "float32", False, True, True, 1.0)
    assert properties(found) == expected
    assert Policy.preset("O1", half="tf32").compute == "tf32"
    assert Policy.preset("O2", half="bfloat16", loss_scale=8.0, masters=False).loss_scale == 8.0


@pytest.mark.parametrize(
    "policy",
    [
        Policy(loss_scale=1024.0),
        Policy().moved("deny", "tanh", "matmul").moved("none", "exp").moved("allow", "my_conv"),
    ],
)
def test_a_policy_is_restored_from_its_fields(policy):
    restored = as_policy(json.loads(json.dumps(asdict(policy))))
    assert restored == policy
    assert hash(restored) == hash(policy)
    for name in ("tanh", "exp", "my_conv"):
        assert restored.list_of(name) == policy.list_of(name)


LEVEL = "policy must be a Policy or one of O0, O1, O2, O3, got "


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Policy.preset("O1", half="float8"),
            "compute must be one of float32, tf32, .*, got 'float8'",
        ),
        (
            lambda: Policy.preset("O2", half="tf32"),
            "params must be one of float32, bfloat16, float16, got 'tf32'",
        ),
        (
            lambda: Policy(loss_scale=-2.0),
            'loss_scale, if it is not "dynamic", must be a positive number',
        ),
        (lambda: Policy(functions=1), "functions must be True or False, got 1"),
        (
            lambda: Policy().moved("maybe", "exp"),
            "the list must be one of allow, deny, infer, none",
        ),
        (
            lambda: Policy().register("half"),
            "the list must be one of allow, deny, infer, got 'half'",
        ),
        (lambda: Policy().register(3, "deny"), "takes a function and a list, got 3"),
        (lambda: Policy().moved("deny", "a,b"), "'a,b' is not the name of a function"),
        (lambda: Policy(moves="tanh"), "moves must be pairs of a function's name and a list"),
        (lambda: autocast(np, ["O1"]), LEVEL + r"\['O1'\]"),
        (lambda: autocast(np, "O4"), LEVEL + "'O4'"),
        (lambda: MasterWeights([np.ones(2)], 3), LEVEL + "3"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(SettingError, match=message):
        make()


def test_no_function_is_on_two_lists():
    from lowprec.amp.policy import DEFAULT_LISTS

    names = [name for text in DEFAULT_LISTS.values() for name in text.split()]
    assert len(names) == len(set(names))


def test_weights_are_cast_and_norms_stay():
    one = np.array([1 / 3, 2.0], np.float32)
    params = {
        "dense": {"w": one, "steps": np.ones(1, np.int64), "exact": one.astype(np.float64)},
        "layers": [{"BatchNorm_0": {"scale": one}}, {"bn1": one, "w": one}],
    }
    cast = Policy.preset("O2").cast_params(params)
    everything = Policy.preset("O3").cast_params(params)
    for found, dtype in (
        (cast["dense"]["w"], np.float16), (cast["dense"]["steps"], np.int64), (cast["dense"]["exact"], np.float64),
        (cast["layers"][0]["BatchNorm_0"]["scale"], np.float32), (cast["layers"][1]["bn1"], np.float32),
        (cast["layers"][1]["w"], np.float16), (everything["layers"][1]["bn1"], np.float16),
    ):  # fmt: skip
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, one.astype(dtype) if len(found) == 2 else [1])


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (
            "bn1 bn_2 layer1.0.BN preBN norm norms.0 q_norm layernorm LayerNorm_0 input_layernorm RMSNorm normLayer",
            True,
        ),
        ("batch_normalization group_normalisation_1 GROUPNORM norm2 encoder.norm1", True),
        (
            "subnet enormous normal_head abnormal bnode turbnet normed_head dense conv_normal_1",
            False,
        ),
    ],
)
def test_words_of_names_decide_which_weights_are_norms(names, kept):
    params = {f"{name}.weight": np.ones(1, np.float32) for name in names.split()}
    cast = Policy.preset("O2").cast_params(params)
    assert {name for name, x in cast.items() if x.dtype == np.float32} == (
        params.keys() if kept else set()
    )


def network(torch):
    """Norms that a name gives away, in a sequence and of the user's; and a name that promises too much."""

    class ScaleNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = torch.nn.Parameter(torch.ones(1))

    nn = torch.nn
    return nn.ModuleDict(
        {
            "stack": nn.Sequential(
                nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.Linear(4, 4), nn.LayerNorm(4),
                nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
                nn.RMSNorm(4), nn.PReLU(4), ScaleNorm(),
            ),
            "normal_head": nn.Linear(4, 4).double(),
            "subnet": nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        }
    )  # fmt: skip


def test_module_types_decide_which_weights_are_norms(torch):
    model = network(torch)
    kept = {1, 3, 4, 5, 6, 8}
    for policy, half in ((Policy.preset("O2"), "float16"), (Policy.preset("O3"), "float16")):
        for found in (policy.cast_params(model), policy.cast_params(model.state_dict(), model)):
            assert found.keys() == model.state_dict().keys()
            for name, x in found.items():
                is_norm = name.startswith("stack") and int(name.split(".")[1]) in kept
                wanted = "float32" if is_norm and policy.norms_float32 else half
                if name.startswith("normal_head"):
                    wanted = "float64"
                elif name.endswith("num_batches_tracked"):
                    wanted = "int64"
                assert str(x.dtype) == f"torch.{wanted}", name
    x = torch.ones(2, 4)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    weights = MasterWeights(layers, "O2")
    copies = weights.update(lambda w, g: {n: x - g[n] for n, x in w.items()}, weights.masters)
    for held in (weights.params, copies):
        types = {name: str(x.dtype).removeprefix("torch.") for name, x in held.items()}
        assert types == {
            "0.weight": "float16", "0.bias": "float16", "1.weight": "float32", "1.bias": "float32",
        }  # fmt: skip
    assert all((x == 0).all() for x in copies.values())
    assert layers(x).dtype == torch.float32, "the model itself stays as it is"


def test_statistics_give_a_norm_away(torch):
    """Without the model, weights next to running statistics stay float32, whatever their names."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    found = Policy.preset("O2").cast_params(model.state_dict())
    types = {name: str(x.dtype).removeprefix("torch.") for name, x in found.items()}
    assert types == {
        "0.weight": "float16", "0.bias": "float16", "1.weight": "float32", "1.bias": "float32",
        "1.running_mean": "float32", "1.running_var": "float32", "1.num_batches_tracked": "int64",
    }  # fmt: skip


def test_a_model_that_is_none_is_refused():
    with pytest.raises(ArrayError, match=r"model must be a torch\.nn\.Module, got 3"):
        Policy.preset("O2").cast_params({"w": np.ones(2, np.float32)}, 3)


def test_inputs_and_outputs():
    one = np.ones(2, np.float32)
    assert Policy.preset("O1").cast_inputs(one) is one
    assert Policy.preset("O2").cast_inputs([one])[0].dtype == np.float16
    assert Policy.preset("O2").cast_output(one.astype(np.float16)).dtype == np.float32


def test_the_scaler_of_a_policy():
    assert Policy.preset("O1").scaler().rule.dynamic
    static = Policy.preset("O2", loss_scale=128.0).scaler()
    assert (static.get_scale(), static.rule.dynamic) == (128.0, False)
    assert Policy.preset("O1").scaler(growth_interval=3).rule.growth_interval == 3


@pytest.mark.parametrize(
    ("which", "types", "found"),
    [
        ("allow", ("float32", "float16"), "float16"),
        ("deny", ("float16", "float16"), "float32"),
        ("infer", ("float16", "float32"), "float32"),
        ("infer", ("float16", "bfloat16"), "float32"),
        ("infer", ("bfloat16", "float64"), "float64"),
        ("infer", ("float16", "float16"), "float16"),
        ("allow", ("float64", "float64"), "float64"),
    ],
)
def test_registered_functions_cast(torch, which, types, found):
    seen = []

    @Policy().register(which)
    def function(x, *, others):
        """Of the user's."""
        seen.append((x.dtype, others[0].dtype))
        return x

    args = [torch.ones(2, dtype=getattr(torch, name)) for name in types]
    function(args[0], others=[args[1], 3])
    assert seen == [(getattr(torch, found),) * 2]
    assert function.__doc__ == "Of the user's."


def test_the_guard_wins_over_a_registered_function():
    half = Policy().register(lambda x: x.dtype.name, "allow")
    one = np.ones(2, np.float16)
    assert half(one) == "float16"
    with fp32_guard():
        assert half(one) == "float32"
