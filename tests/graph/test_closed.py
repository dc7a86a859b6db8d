"""What capture cannot see or preserve: closed layers, models for export, hooks, modes, and models that fail."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import arange, nn
from torch.autograd.function import once_differentiable

from convmesh.errors import CaptureError, CaptureWarning, OpaqueLayerWarning
from convmesh.graph.captured import capture
from convmesh.graph.tracing import intercepted_torch
from convmesh.graph.tracing.aten import _BY_NAME, _METHODS, _REORDERED
from convmesh.ops.core.registry import has_handler, tensor_method
from convmesh.testing import RankPool
from tests.graph.networks import Gated


def test_a_closed_layer_is_reported_with_line_and_reason() -> None:
    with pytest.warns(
        OpaqueLayerWarning, match=r"`gates.\d` stays closed \(networks.py:\d+: if x.sum\(\) > 0:\)"
    ) as told:
        graph = capture(Gated(), (4, 3, 6, 6)).graph
    assert {warning.filename for warning in told} == {__file__}
    assert graph.layers == ("enter", "gates.0", "gates.1", "leave")
    assert "branches on the value of a tensor" in graph.opaque["gates.0"]
    node = graph.node("gates_0")
    assert node.outputs[0].shape == (4, 4, 4, 4)
    assert [weight.name for weight in node.weights] == ["gates.0.conv.weight", "gates.0.conv.bias"]


class Selecting(nn.Module):
    def forward(self, x: Any) -> Any:
        return F.pad(x, [0, int(x.argmax()) * 0])


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    @once_differentiable
    def backward(_: Any, gradient: Any) -> Any:
        return gradient * 5


class Custom(nn.Module):
    def forward(self, x: Any) -> Any:
        return Doubling.apply(x)


class Mixed(nn.Module):
    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.matmul(x, x.transpose(-1, -2))


class Unregistered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Conv2d(3, 3, 1)]

    def forward(self, x: Any) -> Any:
        return self.hidden[0](x)


class Numbers(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * float(x.detach().abs().max().item() > -1)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (Selecting, "needs the value of a tensor"),
        (Custom, r"torch.autograd.Function of its own"),
        (Mixed, "autocast"),
        (Unregistered, "no parameter of the model"),
        (Numbers, "output of `item` depends on the data"),
    ],
)
def test_reasons_to_stay_closed(part: Callable[[], nn.Module], reason: str, pools: dict[int, RankPool]) -> None:
    pools[1].run(closed_part, part, reason)


def closed_part(part: Callable[[], nn.Module], reason: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), part(), nn.Tanh())
    with pytest.warns(OpaqueLayerWarning, match=reason):
        captured = capture(model, (2, 3, 5, 5))
    assert captured.graph.layers == ("0", "1", "2")
    gradients = []
    for network in (model, captured.module):
        x = torch.linspace(-1, 1, 150).view(2, 3, 5, 5).requires_grad_()
        network(x).square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


class Exported(nn.Module):
    """Its own forward calls functions that take no proxies; its parts are ordinary."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.5)
        self.blocks = nn.Sequential(nn.Conv2d(4, 4, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2))
        self.gamma, self.dense = nn.Parameter(torch.full((4, 1, 1), 1.5)), nn.Linear(4, 2)
        self.mean, self.var = nn.Buffer(torch.zeros(4)), nn.Buffer(torch.ones(4))

    def forward(self, x: Any) -> Any:
        if type(x) is not torch.Tensor and not x.is_contiguous(memory_format=torch.contiguous_format):
            x = x.no_such_method()
        y = self.blocks(F.relu(self.norm(self.conv(x)))) * self.gamma
        y = F.batch_norm(y, self.mean, self.var, momentum=0.3, training=True)
        y = torch.cat([y, F.interpolate(y, scale_factor=2.0, mode="bilinear")[:, :, :2, 1:4]], 2)
        y = F.adaptive_avg_pool2d(F.leaky_relu(y, 0.3), 1) + arange(4).view(4, 1, 1).sin()
        strange(x)
        return {"y": self.drop(self.dense(y.view(x.size(0), -1))), "n": [torch.softmax(y.flatten(1), 1)]}


def strange(x: object) -> None:
    """A function that takes no proxies."""
    if not type(x).__module__.startswith("torch"):
        raise TypeError("only torch's own")


def exported_model() -> None:
    torch.manual_seed(0)
    model = Exported()
    start = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.warns(CaptureWarning, match=r"test_closed.py:.*captured by torch.export"):
        captured = capture(model, (4, 3, 16, 16))
    assert {"conv", "norm", "drop", "blocks.0", "blocks.1", "blocks.2", "dense"} < set(captured.graph.layers)
    assert not captured.graph.opaque
    assert captured.graph.layer("blocks.0")[0].op == "Conv2d"
    assert captured.graph.layer("batch_norm")[0].kind == "batch_norm"
    assert all(p is q for p, q in zip(model.parameters(), captured.module.parameters(), strict=True))
    for batch in (4, 6):
        for training in (True, False):
            results = []
            for network in (model, captured.module):
                model.load_state_dict(start)
                model.zero_grad()
                network.train(training)
                torch.manual_seed(1)
                output = network(torch.randn(batch, 3, 16, 16))
                (output["y"].square().sum() + output["n"][0].square().sum()).backward()
                state = {key: value.clone() for key, value in model.state_dict().items()}
                results.append((output, [p.grad.clone() for p in model.parameters() if p.grad is not None], state))
            torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_a_root_that_cannot_be_traced_is_exported(pools: dict[int, RankPool]) -> None:
    pools[1].run(exported_model)


def test_aten_calls_become_functions_that_have_split_versions() -> None:
    for function in _BY_NAME.values():
        assert has_handler(function) or function.__name__ == "feature_dropout", function
    assert {name for name in _METHODS if tensor_method(name) is None} <= {"expand"}
    assert set(_REORDERED) >= {"batch_norm", "group_norm", "slice", "sym_size"}


class Undecided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Any) -> Any:
        y = F.dropout(self.conv(x), 0.5, self.training)
        return y if y.mean() > 0 else -y


def test_a_model_that_nothing_can_see_is_one_node() -> None:
    model = Undecided()
    with pytest.warns(OpaqueLayerWarning, match=r"`\(the model\)` stays closed .*branches on the value"):
        captured = capture(model, (8, 3, 4, 4))
    assert captured.graph.layers == ("model",)
    assert captured.graph.outputs[0].shape == (8, 3, 4, 4)
    assert list(captured.module.state_dict()) == list(model.state_dict())
    x = torch.randn(8, 3, 4, 4)
    for training in (True, False):
        expected = [(torch.manual_seed(0), model.train(training)(x))[1] for _ in range(2)]
        actual = (torch.manual_seed(0), captured.module.train(training)(x))[1]
        assert torch.equal(actual, expected[0])


class Modal(nn.Module):
    def forward(self, x: Any) -> Any:
        return (x, x * 2) if self.training else x


def test_a_branch_on_the_mode_is_reported() -> None:
    model = nn.Sequential(Modal())
    with pytest.warns(CaptureWarning, match=r"`self.training`: the network is captured as it is in training mode"):
        assert len(capture(model, (1, 2)).graph.outputs) == 2
    with pytest.warns(CaptureWarning, match="evaluation mode"):
        assert len(capture(model.eval(), (1, 2)).graph.outputs) == 1


def test_hooks_that_would_be_lost_are_reported() -> None:
    leaf = nn.Tanh()
    model = nn.Sequential(nn.Sequential(leaf))
    leaf.register_forward_hook(lambda *call: call[-1] + 1)
    kept = capture(model, (1, 2)).module
    assert torch.equal(kept(torch.zeros(1, 2)), torch.ones(1, 2))
    model[0].register_forward_hook(lambda *call: call[-1] * 3)
    with pytest.warns(CaptureWarning, match="layer `0` has hooks"):
        changed = capture(model, (1, 2)).module
    assert torch.equal(changed(torch.zeros(1, 2)), torch.full((1, 2), 3.0))


class Strict(nn.Module):
    def forward(self, x: Any) -> Any:
        if x.shape[1] != 5:
            raise ValueError(f"five channels, not {x.shape[1]}")
        return x


@pytest.mark.parametrize(
    ("model", "samples", "message"),
    [
        (lambda x: x, [(1, 2)], r"`model` .* must be a torch.nn.Module; it is a function"),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3)),
            [(1, 2, 8, 8)],
            r"layer `0` \(Conv2d\(3, 4, .* fails on the sample input \(1, 2, 8, 8\)",
        ),
        (nn.Sequential(nn.Sequential(nn.Linear(3, 4))), [(1, 2)], r"layer `0.0` .*fails .*\(it was given \(1, 2\)\)"),
        (Strict(), [(1, 3)], "the model fails on the sample x .*five channels, not 3"),
        (nn.Sequential(nn.Tanh(), Strict()), [(1, 3)], "layer `1` .*fails on the sample .*five channels, not 3"),
        (nn.Linear(3, 4), [(1, 3), (1, 3)], r"`samples` \(2 given\) must be one for each argument"),
        (nn.Linear(3, 4), [], r"`samples` \(0 given\)"),
        (nn.Linear(3, 4), [("a", "b")], "must be a tensor or a shape"),
        (nn.Sequential(nn.LazyLinear(3)), [(1, 3)], r"layer `0` .*not initialised"),
        (
            Undecided().to("meta"),
            [(2, 3, 4, 4)],
            "the model fails .* depends on the data, and its weights are on the meta",
        ),
    ],
)
def test_models_that_cannot_be_captured(model: Any, samples: list[Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(model, *samples)


class Residual(nn.Module):
    """Its parts have two names each, and it adds in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.ConvTranspose2d(2, 2, 2, 2), nn.Conv2d(2, 2, 3, stride=2, padding=1)
        self.again = nn.ModuleDict({"up": self.up})

    def forward(self, x: Any) -> Any:
        strange(x)
        y = self.again["up"](self.down(x))
        y += x
        return y


def test_an_exported_weight_with_two_names_goes_by_its_first() -> None:
    """By another it would be no weight of the plan's, and its gradient would be left unsummed."""
    with pytest.warns(CaptureWarning, match="captured by torch.export"):
        captured = capture(Residual(), (2, 2, 8, 8))
    read = {str(node.target) for node in captured.module.graph.nodes if node.op == "get_attr"}
    assert read == {"up.weight", "up.bias"}
    (node,) = captured.graph.layer("again.up.conv_transpose2d")
    assert {weight.name for weight in node.weights} == {"up.weight", "up.bias"}


def test_an_exported_in_place_sum_has_a_split_version() -> None:
    with pytest.warns(CaptureWarning, match="captured by torch.export"):
        captured = capture(Residual(), (2, 2, 8, 8))
    assert operator.iadd in {node.target for node in captured.module.graph.nodes}


def test_a_torch_that_cannot_be_intercepted_is_not_taken_for_a_model_that_cannot_be_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> Any:
        raise AttributeError("torch has no such part")

    monkeypatch.setattr(intercepted_torch, "function_apply", missing)
    with pytest.raises(AttributeError, match="no such part"):
        capture(nn.Sequential(nn.Tanh()), (1, 2))
