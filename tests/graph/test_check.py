"""A captured network that is not its model is refused, whatever broke it."""

import math
import operator
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from convmesh.errors import CaptureError, CaptureWarning
from convmesh.graph.captured import Captured, capture, compared
from convmesh.graph.checking.small_batches import small_batches
from convmesh.graph.tracing import intercepted_torch
from convmesh.graph.tracing.assemble import assemble
from convmesh.graph.tracing.proxy import ValueProxy
from convmesh.graph.tracing.tracer import LayerTracer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.last = nn.Conv2d(3, 2, 1)

    def forward(self, x: Any) -> Any:
        y = self.norm(self.conv(x))
        z = y
        y += x
        return self.last(F.dropout(F.relu(y), 0.3, self.training) - z)


def broken(monkeypatch: pytest.MonkeyPatch, change: Callable[[fx.Graph], None]) -> None:
    """Capture as if the tracer had recorded another graph."""

    def wrongly(model: nn.Module, graph: fx.Graph, constants: Any) -> fx.GraphModule:
        change(graph)
        return assemble(model, graph, constants)

    monkeypatch.setattr("convmesh.graph.captured.assemble", wrongly)


def without_a_layer(graph: fx.Graph) -> None:
    (norm,) = (node for node in graph.nodes if node.target == "norm")
    norm.replace_all_uses_with(norm.args[0])
    graph.erase_node(norm)


def with_another_slope(graph: fx.Graph) -> None:
    (relu,) = (node for node in graph.nodes if node.target is F.relu)
    relu.target, relu.kwargs = F.leaky_relu, {"negative_slope": 1e-3}


def with_another_output(graph: fx.Graph) -> None:
    (last,) = (node for node in graph.nodes if node.op == "output")
    last.args = ([last.args[0], last.args[0]],)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_a_layer, r"output 0 differs by .* the first layer to differ is `last`"),
        (with_another_slope, r"output 0 differs by .* the first layer to differ is `last`"),
        (with_another_output, r"output 1 differs .* all layers agree"),
    ],
)
def test_a_graph_that_is_not_the_model_is_refused(
    change: Callable[[fx.Graph], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch, change)
    with pytest.raises(CaptureError, match=f"the captured network is not the model: on a batch of .*{message}"):
        capture(Block(), (4, 3, 8, 8))


def test_a_tracer_that_loses_an_in_place_change_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ValueProxy, "__iadd__", lambda self, other: self._call(operator.add, other))
    with pytest.raises(CaptureError, match="is not the model"):
        capture(Block(), (4, 3, 8, 8))


class Halving(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(_: Any, gradient: Any) -> Any:
        return gradient / 2


class OwnGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, x: Any) -> Any:
        return self.last(Halving.apply(self.conv(x)))


def test_a_tracer_that_loses_a_gradient_of_the_users_own_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are the same; only gradients tell."""

    def inlined() -> Callable[..., Any]:
        return lambda cls, *args: cls.forward(None, *args)

    monkeypatch.setattr(intercepted_torch, "function_apply", inlined)
    monkeypatch.setattr(LayerTracer, "autograd_function", lambda _, function, args, __: function(*args))
    with pytest.raises(CaptureError, match=r"gradient of input 0 differs by 1 of its size"):
        capture(OwnGradient(), (2, 3, 4, 4))


def test_a_graph_that_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_a_wrong_name(graph: fx.Graph) -> None:
        (relu,) = (node for node in graph.nodes if node.target is F.relu)
        relu.target = F.linear

    broken(monkeypatch, with_a_wrong_name)
    with pytest.raises(CaptureError, match=r"fails on a batch of .*, the model does not: TypeError"):
        capture(Block(), (4, 3, 8, 8))


class Gambling(nn.Module):
    """Python's own random numbers are frozen when it is captured."""

    def forward(self, x: Any) -> Any:
        return x * random.random()


def test_a_model_that_changes_from_run_to_run_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"something else each time .* random numbers"):
        capture(nn.Sequential(nn.Conv2d(1, 1, 1), Gambling()), (2, 1, 4, 4))


def unchanged_model() -> tuple[Block, dict[str, torch.Tensor]]:
    model = Block()
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    model.conv.weight.register_post_accumulate_grad_hook(lambda _: pytest.fail("the model's own weight got a gradient"))
    return model, {name: value.clone() for name, value in model.state_dict().items()}


def test_the_check_leaves_the_model_as_it_was() -> None:
    model, before = unchanged_model()
    torch.manual_seed(5)
    random_state = torch.get_rng_state()
    assert capture(model, (4, 3, 8, 8)).unchecked == ""
    assert torch.equal(torch.get_rng_state(), random_state)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert model.conv.weight.grad is not None
    assert torch.equal(model.conv.weight.grad, torch.ones_like(model.conv.weight))


def test_a_sample_with_data_is_what_the_networks_are_tried_on() -> None:
    class Positive(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.sqrt()

    sample = torch.rand(4, 2, 4, 4) + 1
    assert capture(nn.Sequential(nn.Conv2d(2, 2, 1), Positive()), sample).unchecked == ""


def test_weights_that_are_not_numbers_agree_with_themselves() -> None:
    model = Block()
    with torch.no_grad():
        model.conv.weight.fill_(torch.nan)
    assert capture(model, (4, 3, 8, 8)).unchecked == ""


def test_weights_on_the_meta_device_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Block().to("meta")
    assert capture(model, (4, 3, 8, 8)).unchecked == ""
    assert all(parameter.is_meta for parameter in model.parameters())
    broken(monkeypatch, without_a_layer)
    with pytest.raises(CaptureError, match="is not the model"):
        capture(model, (4, 3, 8, 8))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.table = nn.Conv2d(3, 3, 1), nn.Buffer(torch.arange(3))

    def forward(self, x: Any) -> Any:
        return self.conv(x)[:, self.table]


def test_what_cannot_be_compared_is_said() -> None:
    assert "meta device" in capture(Table().to("meta"), (2, 3, 4, 4)).unchecked

    class Refusing(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.linalg.cholesky(x)

    with pytest.warns(CaptureWarning, match="was not compared with the model: the model itself fails"):
        assert "LinAlgError" in capture(nn.Sequential(Refusing()), (2, 4, 4)).unchecked


def test_a_check_may_be_left_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, without_a_layer)
    model = Block()
    captured = capture(model, (4, 3, 8, 8), check=False)
    assert captured.unchecked
    with pytest.raises(CaptureError, match="is not the model"):
        compared(captured, model)


def batches_of(model: nn.Module, *shape: int) -> list[Any]:
    captured: Captured = capture(model, shape, check=False)
    return [*small_batches(captured.graph, shrinks_space=True)]


def test_large_inputs_are_tried_small_first() -> None:
    batches = batches_of(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 510 * 510, 2)), 64, 3, 512, 512)
    assert batches[0].shapes == ((2, 3, 64, 64),)
    assert batches[-1].shapes == ((2, 3, 512, 512),)
    assert all(batch.with_gradients for batch in batches)


def test_volumes_too_large_for_gradients_are_tried_forward_or_not_at_all() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv3d(1, 48, 3, padding=1))
    batches = batches_of(model, 8, 1, 128, 128, 128)
    assert batches[-1] == (((1, 1, 128, 128, 128),), False)
    assert max(b.shapes[0][0] for b in batches_of(model, 8, 1, 512, 512, 512)) <= 2


def test_one_of_the_batches_can_be_halved_as_often_as_the_networks_own() -> None:
    captured = capture(
        nn.Sequential(nn.Conv3d(1, 16, 3, padding=1), nn.Conv3d(16, 16, 3, padding=1)), (1, 1, 96, 96, 64)
    )
    tried = [batch.shapes[0] for batch in small_batches(captured.graph, shrinks_space=True)]
    assert (1, 1, 32, 32, 64) in tried
    assert tried == sorted(tried, key=math.prod)


def test_a_network_that_takes_no_small_inputs_is_tried_on_few() -> None:
    tried: list[tuple[int, ...]] = []

    class Placed(nn.Module):
        """Adds to every pixel what it has for its place."""

        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Parameter(torch.randn(16, 96, 96))

        def forward(self, x: Any) -> Any:
            tried.append(tuple(x.shape)) if type(x) is torch.Tensor and x.device.type == "cpu" else None
            return x + self.places

    layers = [nn.Conv2d(16, 16, 1) for _ in range(30)]
    assert capture(nn.Sequential(Placed(), *layers), (4, 16, 96, 96)).unchecked == ""
    sizes = [shape[2:] for shape in dict.fromkeys(tried)]
    assert sizes[-1] == (96, 96)
    assert (32, 32) in sizes, "which can be halved as often"
    assert len(sizes) <= 4


def test_a_difference_of_small_batches_alone_does_not_count() -> None:
    """A constant may hold for the extents of the capture alone; on those it agrees."""

    class Fixed(nn.Module):
        def forward(self, x: Any) -> Any:
            y = F.adaptive_avg_pool2d(x, 1)
            return x + y * (1.0 if str(x.shape[-1]) == "512" else 2.0)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert capture(nn.Sequential(nn.Conv2d(2, 2, 1), Fixed()), (1, 2, 512, 512)).unchecked == ""


class Remembering(nn.Module):
    """Two names lead to its layer, and its forward keeps what it computes in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 1, 1)
        self.again = nn.ModuleDict({"layer": self.layer})
        self.heads: list[Any] = [None]

    def forward(self, x: Any) -> Any:
        self.heads[0] = self.again["layer"](x)
        return self.heads[0] * 2


def test_parameters_and_lists_are_the_models_own_after_a_check() -> None:
    model = Remembering()
    weight = model.layer.weight
    assert capture(model, (2, 1, 4, 4)).unchecked == ""
    assert model.layer.weight is weight
    assert weight.grad is None
    assert model.heads == [None]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x * self.calls


def test_a_model_that_counts_its_calls_is_refused_and_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1), counting := Counting())
    captured = capture(model, (2, 1, 4, 4), check=False)
    with pytest.raises(CaptureError, match=r"something else each time .* a counter"):
        compared(captured, model)
    assert counting.calls == 0


class TwoNames(nn.Module):
    """One module under two names, as nnU-Net's blocks have theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2)
        self.both = nn.Sequential(self.conv, self.norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.both(x)
        return result


def test_a_module_under_two_names_keeps_its_own_weights() -> None:
    model = TwoNames()
    before = dict((*model.named_parameters(), *model.named_buffers()))
    values = {name: tensor.detach().clone() for name, tensor in before.items()}
    assert capture(model, (2, 1, 8, 8)).unchecked == ""
    after = dict((*model.named_parameters(), *model.named_buffers()))
    assert all(after[name] is before[name] for name in before)
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close({n: t.detach() for n, t in after.items()}, values, rtol=0, atol=0)


class Branching(nn.Module):
    """Windows of 7×7 do so: where the image is no larger, they are not shifted."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.conv(x)
        return 2 * y if x.shape[-2] < 40 else y


def test_a_network_that_takes_another_branch_on_small_batches_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On its own extents, which are too large for a check here, it is its model."""
    for limit, elements in (("ENOUGH", 1000), ("MOST_KEPT", 40_000), ("MOST_COMPUTED", 40_000)):
        monkeypatch.setattr(f"convmesh.graph.checking.small_batches.{limit}", elements)
    model, x = Branching(), torch.randn(1, 3, 64, 64)
    with pytest.warns(CaptureWarning, match="not compared .* does not hold for a batch of"):
        captured = capture(model, x)
    assert captured.unchecked
    assert torch.equal(captured.module(x), model(x))
