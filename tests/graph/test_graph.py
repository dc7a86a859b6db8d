"""Graphs are values: lookups, consumers, tables and signatures, without torch."""

import pickle
import subprocess
import sys

import pytest

from convmesh.errors import UnknownNameError
from convmesh.graph import Graph, Node, Value, Weight

WEIGHT = Weight("conv.weight", (4, 1, 3, 3), "float32", learns=True)
MEAN = Weight("norm.running_mean", (4,), "float32", learns=False, is_buffer=True)


def graph(batch: int = 2, kernel: int = 3) -> Graph:
    wide, image = Value((batch, 4, 8, 8), "float32"), Value((batch, 1, 8, 8), "float32")
    nodes = (
        Node("x", "input", "x", "placeholder", (), (image,)),
        Node("conv", "conv", "conv", "Conv2d", ("x",), (wide,), (WEIGHT,), {"kernel": (kernel, kernel)}),
        Node("relu", "pointwise", "relu", "ReLU", ("conv",), (wide,)),
        Node("relu_1", "pointwise", "relu", "ReLU", ("relu",), (wide,)),
        Node("size", "size", "size", "size", ("relu_1",), ()),
        Node("add", "pointwise", "add", "add", ("relu_1", "conv"), (wide,)),
        Node("gate", "opaque", "gate", "Gate", ("add",), (wide,), (), {"reason": "it branches on data"}),
        Node("output", "output", "output", "output", ("gate",), (wide,)),
    )
    return Graph(nodes, (WEIGHT, MEAN))


def test_nodes_and_layers_are_found_by_name() -> None:
    assert graph().node("conv").op == "Conv2d"
    assert [node.name for node in graph().layer("relu")] == ["relu", "relu_1"]
    assert graph().layers == ("conv", "relu", "add", "gate")
    assert [node.name for node in graph().inputs] == ["x"]
    assert graph().outputs == (Value((2, 4, 8, 8), "float32"),)


def test_consumers_come_in_order_and_once() -> None:
    assert [node.name for node in graph().consumers("conv")] == ["relu", "add"]
    assert graph().consumers("output") == ()


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"`layer` \(='cnv'\) is unknown. Did you mean conv"):
        graph().layer("cnv")
    with pytest.raises(UnknownNameError, match=r"`node` \(='relu_2'\).*relu_1"):
        graph().node("relu_2")


def test_parameters_leave_buffers_out() -> None:
    assert graph().parameters == 36


def test_closed_layers_are_listed_with_the_reason() -> None:
    assert graph().opaque == {"gate": "it branches on data"}


def test_the_signature_distinguishes_networks_but_not_batches() -> None:
    assert graph(batch=2).signature == graph(batch=64).signature
    assert graph().signature != graph(kernel=5).signature
    assert len(graph().signature) == 16


def test_rows_count_elements() -> None:
    row = graph().table()[0]
    assert (row.layer, row.op, row.input, row.output) == ("conv", "Conv2d", (2, 1, 8, 8), (2, 4, 8, 8))
    assert (row.weights, row.activations) == (36, 512)


def test_graphs_are_values() -> None:
    assert pickle.loads(pickle.dumps(graph())) == graph()
    assert {graph().node("conv"), graph().node("conv")} == {graph().node("conv")}


def test_long_chains_answer_at_once() -> None:
    """Quadratic lookups would take many seconds here."""
    value = Value((1,), "float32")
    nodes = tuple(
        Node(f"n{i}", "pointwise", f"n{i}", "relu", (f"n{i - 1}",) * (i > 0), (value,)) for i in range(10_000)
    )
    chain = Graph(nodes, ())
    assert all(chain.consumers(f"n{i}")[0] is chain.layer(f"n{i + 1}")[0] for i in range(9_999))


@pytest.mark.parametrize("module", ["convmesh.graph", "convmesh.graph.graph", "convmesh.graph.kinds"])
def test_graphs_load_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_capture_is_the_function_however_it_is_imported() -> None:
    code = (
        "import convmesh.graph as g; from convmesh.graph.captured import capture, Captured; "
        "from convmesh.graph import capture as again; "
        "assert again is capture is g.capture and g.Captured is Captured and 'capture' in dir(g)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    import convmesh.graph

    with pytest.raises(AttributeError, match="no attribute 'captures'"):
        convmesh.graph.captures  # noqa: B018
