"""A captured network equals the model bit for bit: outputs, gradients, buffers, in both modes."""

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from convmesh.errors import CaptureWarning
from convmesh.graph.captured import Captured, capture
from convmesh.testing import RankPool
from tests.graph.networks import NETWORKS

Shapes = Sequence[tuple[int, ...]]


def quiet_capture(name: str, model: nn.Module, shapes: Shapes) -> Captured:
    """Capture, and check that exactly the warnings of the network's row are issued."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        captured = capture(model, *shapes)
    messages = [str(warning.message) for warning in caught]
    expected = NETWORKS[name].notices
    assert len(messages) == len(expected), messages
    assert all(part in message for part, message in zip(expected, messages, strict=True)), messages
    assert all(issubclass(warning.category, CaptureWarning) for warning in caught)
    return captured


def everything(model: nn.Module, run: nn.Module, shapes: Shapes, training: bool) -> tuple[Any, Any, Any]:
    """Outputs, gradients and state after a step from a fixed state."""
    torch.manual_seed(3)
    samples = [torch.randn(shape, requires_grad=True) for shape in shapes]
    run.train(training)
    model.zero_grad()
    output = run(*samples)
    loss = sum((leaf * torch.randn_like(leaf)).sum() for leaf in pytree.tree_leaves(output))
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    gradients |= {f"sample {i}": x.grad.clone() for i, x in enumerate(samples) if x.grad is not None}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return pytree.tree_map(torch.Tensor.detach, output), gradients, state


def check_equality(name: str, training: bool) -> None:
    make, shapes, _ = NETWORKS[name]
    torch.manual_seed(0)
    model = make().train()
    captured = quiet_capture(name, model, shapes)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    assert list(captured.module.state_dict()) == list(start)
    other = [(shape[0] + 2, *shape[1:]) for shape in shapes]  # also a batch of another size
    for batch in (shapes, other):
        model.load_state_dict(start)
        expected = everything(model, model, batch, training)
        model.load_state_dict(start)
        actual = everything(model, captured.module, batch, training)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert expected[1]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_captured_network_is_the_model(name: str, training: bool, pools: dict[int, RankPool]) -> None:
    pools[1].run(check_equality, name, training)


def shared_objects(name: str) -> None:
    make, shapes, _ = NETWORKS[name]
    model = make()
    captured = quiet_capture(name, model, shapes)
    own = dict(model.named_modules())
    found = {path: module for path, module in captured.module.named_modules() if path}
    assert all(own[path] is module for path, module in found.items())
    assert len(found) == len(own) - 1
    parameters = dict(captured.module.named_parameters())
    assert all(parameters[path] is p for path, p in model.named_parameters())
    assert [node.name for node in captured.module.graph.nodes] == [node.name for node in captured.graph.nodes]


@pytest.mark.parametrize("name", NETWORKS)
def test_modules_and_parameters_are_the_models_own(name: str, pools: dict[int, RankPool]) -> None:
    pools[1].run(shared_objects, name)


def identities(model: nn.Module) -> tuple[Any, Any]:
    """Which objects the attributes of all parts are, and which tensors they hold."""
    attributes = {path: {key: id(v) for key, v in vars(m).items()} for path, m in model.named_modules()}
    return attributes, [id(tensor) for tensor in (*model.parameters(), *model.buffers())]


def nothing_changed(name: str) -> None:
    make, shapes, _ = NETWORKS[name]
    torch.manual_seed(0)
    model = make()
    attributes, tensors = identities(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    quiet_capture(name, model, shapes)
    assert torch.equal(torch.get_rng_state(), random)
    assert (attributes, tensors) == identities(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    assert "training" not in vars(nn.Module)


@pytest.mark.parametrize("name", NETWORKS)
def test_capturing_changes_nothing(name: str, pools: dict[int, RankPool]) -> None:
    pools[1].run(nothing_changed, name)
