"""What capture finds in a model: layers by name, kinds, shapes, windows, weights."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from convmesh import Mesh, dry_mesh, shard
from convmesh.graph.captured import capture
from convmesh.graph.graph import Value
from convmesh.testing import RankPool, natural_cut
from tests.graph.networks import Branches, Functional, Norms, Residual, Shapes, Shared
from tests.ops.test_network import NETWORKS as SPLIT_NETWORKS


class LeNet5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.s2 = nn.Conv2d(1, 6, 5), nn.AvgPool2d(2)
        self.c3, self.s4 = nn.Conv2d(6, 16, 5), nn.AvgPool2d(2)
        self.c5, self.f6, self.out = nn.Conv2d(16, 120, 5), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Any) -> Any:
        x = self.s4(torch.tanh(self.c3(self.s2(torch.tanh(self.c1(x))))))
        return self.out(torch.tanh(self.f6(torch.tanh(self.c5(x)).flatten(1))))


def test_the_table_of_layer_sizes_of_lenet5() -> None:
    graph = capture(LeNet5(), (1, 1, 32, 32)).graph
    sizes = {row.layer: (row.output[1:], row.weights, row.activations) for row in graph.table()}
    assert {name: sizes[name] for name in ("c1", "s2", "c3", "s4", "c5", "f6", "out")} == {
        "c1": ((6, 28, 28), 156, 4704),
        "s2": ((6, 14, 14), 0, 1176),
        "c3": ((16, 10, 10), 2416, 1600),
        "s4": ((16, 5, 5), 0, 400),
        "c5": ((120, 1, 1), 48120, 120),
        "f6": ((84,), 10164, 84),
        "out": ((10,), 850, 10),
    }
    assert graph.parameters == 61706
    assert graph.layers[:4] == ("c1", "tanh", "s2", "c3")


def test_layers_are_named_by_who_calls_them() -> None:
    graph = capture(Residual(), (4, 3, 8, 7)).graph
    assert graph.layers == (
        *("enter", "norm", "mul", "relu", "mul_1", "add", "add_1", "mul_2", "add_2", "relu_1", "dropout"),
    )
    kinds = [graph.layer(name)[0].kind for name in graph.layers]
    assert kinds[:5] == ["conv", "batch_norm", "pointwise", "pointwise", "pointwise"]
    assert graph.layer("add")[0].op == "Conv2d"  # the module; the sums have numbers


def test_a_module_called_twice_is_one_layer() -> None:
    graph = capture(Shared(), (4, 3, 5, 5)).graph
    first, second = graph.layer("block.0")
    assert (first.inputs, second.inputs) == (("x",), ("block_1",))
    assert first.weights == second.weights
    assert graph.layer("other")[0].weights[0].name == "tied.weight"
    assert [weight.name for weight in graph.layer("mul")[0].weights] == ["gamma"]


def test_windows_have_a_number_per_dim() -> None:
    graph = capture(Functional(), (4, 3, 9, 9)).graph
    conv, pool = graph.layer("conv2d")[0], graph.layer("max_pool2d")[0]
    assert conv.kind == "conv"
    assert [weight.name for weight in conv.weights] == ["kernel", "bias"]
    expected = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 0), "dilation": (1, 1), "groups": 1}
    assert {key: conv.options[key] for key in expected} == expected
    assert (pool.options["kernel"], pool.options["stride"]) == ((2, 2), (2, 2))
    module = capture(nn.Conv3d(4, 4, 3, padding=(1, 0, 2), groups=2, bias=False), (1, 4, 5, 5, 5)).graph
    assert module.layers == ("conv3d",)


@pytest.mark.parametrize(
    ("module", "shape", "kind"),
    [
        (nn.ConvTranspose3d(2, 3, 2), (1, 2, 4, 4, 4), "conv_transpose"),
        (nn.Linear(4, 2), (3, 4), "linear"),
        (nn.BatchNorm3d(2), (1, 2, 3, 3, 3), "batch_norm"),
        (nn.GroupNorm(1, 2), (1, 2, 3), "norm"),
        (nn.LayerNorm(3), (1, 2, 3), "norm"),
        (nn.RMSNorm(3), (1, 2, 3), "norm"),
        (nn.AdaptiveAvgPool2d(1), (1, 2, 4, 4), "pool"),
        (nn.LPPool2d(2, 2), (1, 2, 4, 4), "pool"),
        (nn.GELU(), (1, 2), "pointwise"),
        (nn.LogSigmoid(), (1, 2), "pointwise"),
        (nn.Hardswish(), (1, 2), "pointwise"),
        (nn.Identity(), (1, 2), "pointwise"),
        (nn.Dropout2d(), (1, 2, 3, 3), "dropout"),
        (nn.AlphaDropout(), (1, 2), "dropout"),
        (nn.Flatten(), (1, 2, 3), "reshape"),
        (nn.PixelShuffle(2), (1, 4, 3, 3), "reshape"),
        (nn.Upsample(scale_factor=2), (1, 2, 3, 3), "resize"),
        (nn.UpsamplingBilinear2d(scale_factor=2), (1, 2, 3, 3), "resize"),
        (nn.ReflectionPad2d(1), (1, 2, 3, 3), "resize"),
        (nn.LogSoftmax(1), (1, 2), "softmax"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_kinds_of_torch_modules(module: nn.Module, shape: tuple[int, ...], kind: str) -> None:
    graph = capture(nn.Sequential(module), shape).graph
    assert [graph.layer(name)[0].kind for name in graph.layers] == [kind]


class Diagonal(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.diagonal(dim1=-2, dim2=-1)


def test_an_operator_of_no_known_kind_is_visible_but_opaque() -> None:
    graph = capture(nn.Sequential(nn.Hardtanh(), Diagonal()), (1, 2, 4, 4)).graph
    assert graph.opaque == {"1.diagonal": "`diagonal` is an unknown operator"}


def test_sizes_stay_symbolic() -> None:
    captured = capture(Shapes(), (4, 3, 9, 7))
    ramp = captured.graph.node("arange")
    assert (ramp.kind, ramp.outputs) == ("attribute", (Value((4,), "float32"),))
    size = captured.graph.node(ramp.inputs[0])
    assert (size.kind, size.outputs, captured.values[size.name]) == ("size", (), 4)
    assert captured.values["x"].shape == (4, 3, 9, 7)


def test_a_loop_over_the_batch_refuses_another_batch() -> None:
    captured = capture(PerSample(), (3, 4))
    assert torch.equal(captured.module(torch.ones(3, 4)), torch.full((4,), 3.0))
    with pytest.raises(ValueError, match=r"captured where .*for row in x.* gives 3, but this input gives 2"):
        captured.module(torch.ones(2, 4))


class PerSample(nn.Module):
    def forward(self, x: Any) -> Any:
        total = torch.zeros(4)
        for row in x:
            total = total + row
        return total


def test_computed_weights_belong_to_their_layer() -> None:
    graph = capture(Norms(), (4, 3, 6, 6)).graph
    conv = graph.layer("conv")[0]
    assert (conv.kind, conv.op, conv.options["parametrized"]) == ("conv", "Conv2d", True)
    assert {weight.name for weight in conv.weights} >= {"conv.parametrizations.weight.original0"}
    own = graph.layer("own.matmul")[0]
    assert {weight.name for weight in own.weights} == {f"own.parametrizations.weight.original{i}" for i in (0, 1)}


def test_samples_are_tensors_or_shapes() -> None:
    model = Branches().double()
    by_shape, by_tensor = capture(model, (4, 3, 8, 7)), capture(model, torch.empty(4, 3, 8, 7, dtype=torch.float64))
    assert by_shape.graph == by_tensor.graph
    assert by_shape.graph.outputs == (Value((4, 5), "float64"),)
    labels = capture(nn.Sequential(nn.Embedding(7, 2)), (4, 3), dtype=torch.int64).graph
    assert labels.outputs == (Value((4, 3, 2), "float32"),)


def test_a_model_larger_than_memory_stays_on_meta() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2**15, 2**15) for _ in range(7)))
    captured = capture(model, (2, 2**15))
    assert sum(weight.elements for weight in captured.graph.weights) * 4 > 24 * 2**30
    assert all(p.is_meta for p in captured.module.parameters())
    assert captured.graph.outputs == (Value((2, 2**15), "float32"),)


def test_a_thousand_layers() -> None:
    blocks = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(1000)]
    graph = capture(nn.Sequential(*blocks), (2, 4, 8, 8)).graph
    assert len(graph.layers) == 3000


def dry_shapes(name: str) -> None:
    make, shape = SPLIT_NETWORKS[name]
    model = make().to("meta")
    mesh = dry_mesh(Mesh(data=2, height=2), 1)
    module = capture(model, shape).module
    sent = []
    for network in (model, module):
        x = shard(torch.zeros(shape, device="meta"), mesh, natural_cut(mesh.mesh, len(shape)))
        with mesh.traffic.watch() as traffic:
            y = network(x)
            y.backward(torch.empty_like(y.local))
        sent.append((y.shape, y.layout, traffic))
    assert sent[0] == sent[1]
    assert sent[0][2].bytes_total > 0


@pytest.mark.parametrize("name", ["unet3d-batch", "unet2d-batch", "classifier"])
def test_it_runs_split_as_the_model_does(name: str, pools: dict[int, RankPool]) -> None:
    pools[1].run(dry_shapes, name)


def test_functions_keep_their_settings() -> None:
    class Net(nn.Module):
        def forward(self, x: Any) -> Any:
            return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)

    node = capture(Net(), (1, 2, 3, 3)).graph.layer("interpolate")[0]
    assert (node.kind, node.options["mode"]) == ("resize", "bilinear")


class Asking(nn.Module):
    """Asks what it was given in the ways that other packages do, and rounds sizes."""

    def forward(self, x: Any) -> Any:
        assert torch.is_tensor(x)
        assert x.__class__ is torch.Tensor
        rows = round(x.shape[2] * 0.6)
        with pytest.raises(TypeError, match="0-d tensor"):
            len(x.sum())
        return x[:, :, :rows]


def test_values_answer_as_tensors_do() -> None:
    assert capture(Asking(), (1, 2, 5, 4)).graph.outputs[0].shape == (1, 2, 3, 4)
