"""What a traced step keeps for backward: less than was traced, with the same results."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from convmesh.private_torch.tracing import returns_views
from convmesh.runtime.compiled.batch_types import read_as_cast
from convmesh.runtime.compiled.operand_layout import lay_out_operands
from convmesh.runtime.compiled.pool_offsets import MOST_IN_A_BYTE, keep_offsets
from convmesh.runtime.compiled.recomputed_values import recompute_values
from convmesh.runtime.compiled.traced_graph import drop_detaching

Loss = Callable[..., torch.Tensor]


def traced(loss_of: Loss, *given: torch.Tensor) -> fx.GraphModule:
    """`module(tangent, *given)`: the loss, then the gradients of all that is given."""

    def step(tangent: torch.Tensor, *values: torch.Tensor) -> list[torch.Tensor]:
        leaves = [v.detach().requires_grad_() for v in values]
        loss = loss_of(*leaves)
        return [loss.detach(), *torch.autograd.grad(loss, leaves, tangent)]

    module = make_fx(step, tracing_mode="fake")(torch.ones(()), *given)
    drop_detaching(module.graph)
    module.graph.eliminate_dead_code()
    return module


def tangent_of(module: fx.GraphModule) -> fx.Node:
    tangent: fx.Node = module.graph.find_nodes(op="placeholder")[0]
    return tangent


def kept(module: fx.GraphModule) -> list[tuple[str, torch.dtype]]:
    """The values that backward reads from forward: what computed them, and their types."""
    nodes = list(module.graph.nodes)
    begin = min(nodes.index(reader) for reader in tangent_of(module).users)
    read = {_memory(source) for node in nodes[begin:-1] for source in node.all_input_nodes}
    return [(n.target.__name__, n.meta["val"].dtype) for n in nodes[:begin] if n in read and n.op == "call_function"]


def _memory(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and returns_views(node.target):
        node = node.all_input_nodes[0]
    return node


def compared(loss_of: Loss, *given: torch.Tensor) -> list[tuple[str, torch.dtype]]:
    """What is kept after the change, whose results are those of before to the bit."""
    module = traced(loss_of, *given)
    tangent = torch.tensor(0.5)
    expected = module(tangent, *given)
    keep_offsets(module.graph)
    recompute_values(module.graph, tangent_of(module))
    module.graph.lint()
    module.recompile()
    for found, before in zip(module(tangent, *given), expected, strict=True):
        assert torch.equal(found, before)
    return kept(module)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def test_of_a_relu_whose_sign_alone_is_read_a_byte_is_kept() -> None:
    image, weight = drawn(2, 3, 8, 8), drawn(4, 3, 3, 3)
    assert compared(lambda x, w: F.relu(F.conv2d(x, w)).sum(), image, weight) == [("le.Scalar", torch.bool)]


def test_a_relu_that_a_convolution_reads_is_kept() -> None:
    image, weight = drawn(2, 3, 8, 8), drawn(3, 3, 3, 3)
    found = compared(lambda x, w: F.conv2d(F.relu(F.conv2d(x, w)), w).sum(), image, weight)
    assert found == [("relu.default", torch.float32)]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 3, 9, 8), {"kernel_size": 2}),
        ((1, 2, 11, 12), {"kernel_size": (3, 2), "stride": (2, 1), "padding": 1, "ceil_mode": True}),
        ((2, 2, 12, 13), {"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 2}),
        ((1, 2, 6, 7, 9), {"kernel_size": (2, 3, 3), "stride": 2, "padding": (1, 0, 1), "dilation": (1, 1, 2)}),
    ],
)
def test_of_a_maximum_its_place_in_the_window_is_kept(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    pool = F.max_pool2d if len(shape) == 4 else F.max_pool3d
    found = compared(lambda x: pool(x * 2, **options).square().sum(), drawn(*shape))
    assert ("mul.Tensor", torch.float32) not in found
    assert [dtype for _, dtype in found if not dtype.is_floating_point] == [torch.int8]


def test_indices_within_large_windows_are_kept() -> None:
    assert MOST_IN_A_BYTE < 12 * 12
    found = compared(lambda x: F.max_pool2d(x * 2, 12).square().sum(), drawn(1, 2, 24, 24))
    assert [dtype for _, dtype in found if not dtype.is_floating_point] == [torch.int64]


def test_what_follows_from_a_value_that_is_there_anyway_is_computed_again() -> None:
    def loss_of(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = F.conv2d(x, w)
        return F.relu((y - y.mean((0, 2, 3), keepdim=True)) * 2).sum() + (y.flatten(1) @ v).sum()

    found = compared(loss_of, drawn(2, 3, 8, 8), drawn(4, 3, 3, 3), drawn(144, 5))
    assert ("convolution.default", torch.float32) in found
    assert not {"relu.default", "mul.Tensor", "sub.Tensor", "le.Scalar"} & {name for name, _ in found}


def test_a_cast_to_a_wider_type_is_made_again() -> None:
    def loss_of(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(F.conv2d(x, w).float(), (6,)).square().sum()

    found = compared(loss_of, drawn(2, 3, 8, 8, dtype=torch.bfloat16), drawn(4, 3, 3, 3, dtype=torch.bfloat16))
    assert ("convolution.default", torch.bfloat16) in found
    assert ("_to_copy.default", torch.float32) not in found


def test_what_is_written_to_is_not_computed_again() -> None:
    def loss_of(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        y = F.conv2d(x, w)
        loss = F.relu(y - mean).sum() + (y.flatten(1) @ v).sum()
        mean.detach().mul_(3)  # as running statistics are updated
        return loss

    given = drawn(2, 3, 8, 8), drawn(4, 3, 3, 3), drawn(144, 5)
    module = traced(loss_of, *given, torch.zeros(()))
    recompute_values(module.graph, tangent_of(module))
    assert ("le.Scalar", torch.bool) in kept(module)


def test_a_batch_that_is_only_read_as_a_cast_is_given_as_one() -> None:
    def loss_of(x: Any, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x.to(torch.bfloat16), w).float().sum()

    module = make_fx(loss_of, tracing_mode="fake")(drawn(2, 3, 8, 8), drawn(4, 3, 3, 3, dtype=torch.bfloat16))
    batch = module.graph.find_nodes(op="placeholder")[0]
    read_as_cast([batch])
    module.recompile()
    assert batch.meta["val"].dtype == torch.bfloat16
    image, weight = drawn(2, 3, 8, 8), drawn(4, 3, 3, 3, dtype=torch.bfloat16)
    assert torch.equal(module(image.to(torch.bfloat16), weight), loss_of(image, weight))


def test_convolutions_still_read_channels_last() -> None:
    """A kernel that is given another format copies it first, which took two of ten milliseconds of a vgg16 on a GPU."""

    def loss_of(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.relu(F.conv2d(x, w))
        return torch.stack([y[..., ::2, ::2], y[..., 1::2, ::2]]).amax(0).square().sum()

    last: dict[str, Any] = {"memory_format": torch.channels_last}
    image, weight = drawn(2, 8, 12, 12).contiguous(**last), drawn(8, 8, 3, 3).contiguous(**last)
    module = traced(loss_of, image, weight)
    recompute_values(module.graph, tangent_of(module))
    lay_out_operands(module.graph)
    module.recompile()
    seen: list[bool] = []

    class Watched(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target is torch.ops.aten.convolution_backward.default:
                seen.extend(operand.is_contiguous(**last) for operand in args[:3])
            return super().call_function(target, args, kwargs)

    Watched(module).run(torch.ones(()), image, weight)
    assert ("le.Scalar", torch.bool) in kept(module)
    assert seen == [True] * 3
