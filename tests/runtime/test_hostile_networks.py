"""What packages do in `forward` runs split as it runs whole; what cannot is refused in one line, before it is sent."""

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import convmesh as cm
from convmesh import Mesh
from convmesh.errors import CaptureError, ConvMeshError
from convmesh.testing import opened
from tests.conftest import Pools
from tests.graph.hostile import HOSTILE, Fivefold, conv, with_computed_weights

SHAPE = (2, 4, 8, 8)
MESHES = {"data": Mesh(data=2), "spatial": Mesh(height=2), "filter": Mesh(filter=2)}


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return leaves([*value.values()])
    return [leaf for part in value for leaf in leaves(part)] if isinstance(value, (list, tuple)) else [value]


def difference(name: str, strategy: str) -> tuple[float, list[str]]:
    """How far outputs and gradients are from those of one process, relative to the largest; and warnings."""
    torch.manual_seed(0)
    make, mesh = HOSTILE[name].make, MESHES[strategy]
    model, x = make().double(), torch.randn(SHAPE, dtype=torch.float64)
    whole, split = make().double(), model
    whole.load_state_dict(model.state_dict())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        net = cm.parallelize(split, cm.plan(split, x, mesh, strategy), mesh=opened(mesh))
    expected = leaves(whole(x.clone()))
    torch.stack([y.double().square().sum() for y in expected]).sum().backward()
    made = leaves(net(net.shard_input(x)))
    found = [net.gather_output(y) if len(made) == 1 else y for y in made]
    grads: list[Any] = [2 * y.detach() for y in made]
    torch.autograd.backward(made, grads)
    pairs = list(zip(found, expected, strict=True)) if len(made) == 1 else []
    own = net.full_gradients()
    pairs += [(own[n], p.grad) for n, p in whole.named_parameters() if p.grad is not None]
    scale = max(float(b.detach().abs().max()) for _, b in pairs)  # of all: some gradients are but rounding errors
    worst = max(float((a - b).detach().abs().max()) for a, b in pairs) / scale
    return worst, [str(each.message) for each in told]


TRIED = [(name, each.strategy or [*MESHES][i % 3]) for i, (name, each) in enumerate(HOSTILE.items())]


@pytest.mark.parametrize(("name", "strategy"), TRIED)
def test_networks_of_packages_are_exact(pools: Pools, name: str, strategy: str) -> None:
    limit = 1e-4 if name == "MixedTypes" else 1e-9
    for worst, told in pools[2].run(difference, name, strategy):
        assert worst < limit
        says = HOSTILE[name].says
        assert (not says and not told) or any(says in line for line in told), told


class Several(nn.Module):
    """Several inputs, of different shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.scale = conv(), nn.Linear(3, 4)

    def forward(self, x: Any, facts: Any) -> Any:
        return self.image(x) * self.scale(facts)[:, :, None, None].sigmoid()


def two_inputs() -> list[float]:
    """By strategy: how far output and gradients are from those of one process."""
    torch.manual_seed(0)
    x, facts, found = torch.randn(SHAPE, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64), []
    for strategy, mesh in MESHES.items():
        model, whole = Several().double(), Several().double()
        whole.load_state_dict(model.state_dict())
        net = cm.parallelize(model, cm.plan(model, [x, facts], mesh, strategy), mesh=opened(mesh))
        whole.load_state_dict(net.full_state_dict())
        y, expected = net(*net.shard_input(x, facts)), whole(x, facts)
        y.backward(2 * y.detach())
        expected.square().sum().backward()
        own = net.full_gradients()
        pairs = [(net.gather_output(y), expected), *((own[n], p.grad) for n, p in whole.named_parameters())]
        found.append(max(float((a - b).detach().abs().max()) for a, b in pairs))
    return found


class StochasticDepth(nn.Module):
    """A branch that is left out for samples drawn anew in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = conv()

    def forward(self, x: Any) -> Any:
        y = self.branch(x)
        if self.training:
            y = y * torch.empty(x.shape[0], 1, 1, 1, dtype=x.dtype, device=x.device).bernoulli_(0.5).div_(0.5)
        return x + y


def kept_samples() -> list[list[float]]:
    """By strategy and sample: by how much the branch is scaled, if all of a sample agrees."""
    x, found = torch.randn(8, 4, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), []
    for strategy, mesh in MESHES.items():
        torch.manual_seed(0)
        model = StochasticDepth().double()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a branch on `self.training` is captured as it is now
            net = cm.parallelize(model, cm.plan(model, x, mesh, strategy), mesh=opened(mesh))
        net.manual_seed(0)
        state = {name.removeprefix("branch."): value for name, value in net.full_state_dict().items()}
        branch = torch.nn.functional.conv2d(x, state["weight"], state["bias"], padding=1)
        ratio = (net.gather_output(net(net.shard_input(x))).detach() - x) / branch
        assert (ratio - ratio[:, :1, :1, :1]).abs().max() < 1e-6
        found.append([round(float(scale), 6) for scale in ratio[:, 0, 0, 0]])
    return found


def test_stochastic_depth_leaves_out_the_same_samples_however_they_are_cut(pools: Pools) -> None:
    first, second = pools[2].run(kept_samples)
    assert first == second
    assert first[0] == first[1] == first[2]
    assert {*first[0]} == {0.0, 2.0}


class Dynamic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = conv()

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        return y[y > 0].sum()


@torch.library.custom_op("convmesh_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = conv()

    def forward(self, x: Any) -> Any:
        return doubled(self.layer(x))


class Tied(nn.Module):
    """One weight in a convolution and in a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv(), conv()
        self.second.weight = self.first.weight

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))


@pytest.mark.filterwarnings("ignore")
def test_a_custom_operator_is_refused_by_its_name() -> None:
    with pytest.raises(ConvMeshError, match="doubled"):
        cm.plan(Custom(), SHAPE, MESHES["spatial"], "spatial")


@pytest.mark.filterwarnings("ignore")
def test_shapes_that_depend_on_values_are_refused() -> None:
    with pytest.raises(ConvMeshError, match="instead of a mask"):
        cm.plan(Dynamic(), SHAPE, MESHES["spatial"], "spatial")


class Mean(nn.Module):
    """Branches in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = conv()

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        return y * 2 if y.mean() > 0 else y


class OwnGradients(nn.Module):
    """A gradient of its own, which torch.export would lose."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = conv()

    def forward(self, x: Any) -> Any:
        return Fivefold.apply(self.layer(x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Mean, r"y \* 2 if y.mean\(\) > 0 else y\): it branches"),
        (OwnGradients, "it uses a torch.autograd.Function of its own"),
    ],
)
def test_a_model_that_cannot_be_looked_into_is_told_the_line_and_the_way_out(
    model: type[nn.Module], reason: str
) -> None:
    with pytest.raises(ConvMeshError, match=rf"{reason}.*\. Move that line into an nn.Module of its own"):
        cm.plan(model(), SHAPE, MESHES["data"], "data")


class PerSample(nn.Module):
    """A convolution with other weights for each sample, as CondConv writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(4, 4 * 4 * 9)

    def forward(self, x: Any) -> Any:
        n, c, h, w = x.shape
        weight = self.weight(x.mean((2, 3))).view(n * 4, c, 3, 3)
        return torch.nn.functional.conv2d(x.reshape(1, n * c, h, w), weight, padding=1, groups=n).view(n, 4, h, w)


@pytest.mark.parametrize("strategy", [*MESHES])
def test_a_convolution_with_weights_of_the_input_is_refused(strategy: str) -> None:
    with pytest.raises(ConvMeshError, match=r"layer 'conv2d'.*these depend on the input. Write it with F.unfold"):
        cm.plan(PerSample(), SHAPE, MESHES[strategy], strategy)


@dataclass
class Both:
    map: Any
    scores: Any


class ReturnsADataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = conv()

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        return Both(y, y.mean((2, 3)))


def test_a_dataclass_of_outputs_is_refused_by_its_name() -> None:
    with pytest.raises(CaptureError, match="returns Both, a dataclass; return a tensor, or a tuple, list or dict"):
        cm.plan(ReturnsADataclass(), SHAPE, MESHES["data"], "data")


def test_a_weight_that_is_computed_is_not_cut() -> None:
    with pytest.raises(ConvMeshError, match=r"layer '0' is cut by filter, but its weight is computed from others"):
        cm.plan(with_computed_weights(), SHAPE, MESHES["filter"], {"*": {}, "0": {"channel": "filter"}})


def test_a_weight_of_two_layers_is_cut_alike_or_refused() -> None:
    plan = {"first": {"channel": "filter"}, "second": {}}
    with pytest.raises(ConvMeshError, match="has the same weight"):
        cm.plan(Tied(), SHAPE, MESHES["filter"], plan)


def test_weights_of_another_type_than_the_sample_are_named() -> None:
    with pytest.raises(CaptureError, match=r"layer `0` .*fails on the sample"):
        cm.plan(nn.Sequential(conv().half()), torch.randn(SHAPE), MESHES["data"], "data")


def test_two_inputs_are_exact(pools: Pools) -> None:
    for found in pools[2].run(two_inputs):
        assert max(found) < 1e-10


class HalfEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = conv(), conv().to("meta")

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x))


def refused_devices() -> str:
    model, mesh = HalfEmpty(), MESHES["data"]
    plan = cm.plan(model, SHAPE, mesh, "data")
    with pytest.raises(ConvMeshError) as error:
        cm.parallelize(model, plan, mesh=opened(mesh))
    return str(error.value)


def test_weights_with_and_without_values_are_refused_on_all_ranks(pools: Pools) -> None:
    for message in pools[2].run(refused_devices):
        assert "`model` has 'last.weight' on the meta device, but 'first.weight' is not" in message


def refused_without_weights() -> str:
    with torch.device("meta"):
        model = nn.Sequential(conv())
    mesh = MESHES["data"]
    net = cm.parallelize(model, cm.plan(model, SHAPE, mesh, "data"), mesh=opened(mesh))
    with pytest.raises(ConvMeshError) as error:
        net(net.shard_input(torch.zeros(SHAPE)))
    net.reset_parameters()
    net(net.shard_input(torch.zeros(SHAPE)))
    return str(error.value)


def test_a_network_without_weights_does_not_run(pools: Pools) -> None:
    for message in pools[2].run(refused_without_weights):
        assert "has no weights yet; call `net.load_full_state_dict(state)`" in message
