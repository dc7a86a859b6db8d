"""Every private part of torch that ConvMesh uses still does what it is used for, and nothing else is used."""

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.modules import transformer
from torch.utils import checkpoint

import convmesh
from convmesh.private_torch import attention_kernels, tree_flatten, tree_leaves, tree_map, tree_unflatten
from convmesh.private_torch.autocast_lists import policies
from convmesh.private_torch.backward_engine import (
    at_end_of_backward,
    backward_number,
    hooks_on_gradient,
    keeps_its_graph,
    running_node,
    will_run,
)
from convmesh.private_torch.dispatching import FakeTensor, TorchDispatchMode, has_meta_kernel
from convmesh.private_torch.dtensors import blocks_of, cut_dim, in_blocks
from convmesh.private_torch.exporting import calling_module, is_guard
from convmesh.private_torch.fourier_kernels import FOURIER_KERNELS
from convmesh.private_torch.gloo_groups import gloo_group_like
from convmesh.private_torch.inductor import compile_graph
from convmesh.private_torch.interception import (
    checkpoint_generators,
    checkpoints_inlined,
    function_apply,
    mask_questions,
    replaced,
)
from convmesh.private_torch.meta_autocast import KINDS, Cast, meta_autocast
from convmesh.private_torch.module_tables import (
    buffers_of,
    children_of,
    copy_state,
    give_tables,
    has_forward_hooks,
    has_hooks,
    parameters_of,
    parts_of,
    share_state,
    standing_in,
)
from convmesh.private_torch.pipeline_stages import needs_every_gradient, stage_backward_input, stage_backward_weight
from convmesh.private_torch.stores import default_store
from convmesh.private_torch.tensor_internals import (
    as_subclass_leaf,
    copy_all_,
    is_view,
    local_shard,
    memory_key,
    multiply_all_,
    norms_of,
    storage_key,
    version_of,
)
from convmesh.private_torch.tracing import (
    FakeTensorMode,
    is_cast,
    is_elementwise,
    is_traced,
    returns_views,
    tree_map_only,
    without_modes,
    writes_to,
)
from convmesh.private_torch.unscaling import OpenGradScaler
from convmesh.testing import RankPool, run_ranks

SOURCE = Path(convmesh.__file__).parent


def test_trees_flatten_in_order_and_come_back() -> None:
    tree = {"a": [1, (2, None)], "b": 3}
    leaves, spec = tree_flatten(tree)
    assert leaves == tree_leaves(tree) == [1, 2, None, 3]
    assert tree_unflatten(leaves, spec) == tree == tree_map(lambda leaf: leaf, tree)


def sum_of_ranks_on_one_loop() -> float:
    world, ranks = dist.group.WORLD, torch.tensor([float(dist.get_rank())])
    assert world is not None
    store = dist.PrefixStore("one loop", default_store())  # type: ignore[attr-defined]
    group = gloo_group_like(world, store, dist.get_rank(), dist.get_world_size(), timedelta(seconds=60))
    group.allreduce([ranks]).wait()
    return ranks.item()


def test_a_gloo_group_uses_another_ones_devices() -> None:
    assert run_ranks(2, sum_of_ranks_on_one_loop) == [1.0, 1.0]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> Any:
        return gradient * 2


def test_apply_of_an_autograd_function_takes_its_class_and_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = function_apply()
    x = torch.ones(2, requires_grad=True)
    apply(Doubled, x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]
    monkeypatch.setattr(torch.autograd.Function, "apply", classmethod(lambda cls, *args: (cls, args)))
    assert Doubled.apply(x) == (Doubled, (x,))


def test_checkpoint_runs_one_of_the_generators_that_tracing_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    def around(name: str) -> Any:
        def generator(*settings: Any, **named: Any) -> Iterator[None]:
            used.append(name)
            yield

        return generator

    for name in checkpoint_generators():
        monkeypatch.setattr(checkpoint, name, around(name))
    x = torch.ones(2, requires_grad=True)
    assert checkpoint.checkpoint(torch.exp, x, use_reentrant=False).requires_grad
    assert len(used) == 1


class Told:
    times = 0

    def __call__(self) -> None:
        self.times += 1


def test_batch_norms_count_once_where_checkpoints_are_inlined() -> None:
    for is_reentrant in (False, True):
        norm, told, x = nn.BatchNorm1d(2), Told(), torch.randn(4, 2, requires_grad=True)
        with checkpoints_inlined(told):
            checkpoint.checkpoint(norm, x, use_reentrant=is_reentrant).sum().backward()
        assert norm.num_batches_tracked == told.times == 1
        checkpoint.checkpoint(norm, x, use_reentrant=is_reentrant).sum().backward()
        assert norm.num_batches_tracked == 3  # torch's own counts twice


def test_transformers_ask_for_masks_what_a_stand_in_can_answer() -> None:
    class StandIn:
        value = torch.ones(3, 3).triu(1)

    def value_of(mask: Any) -> Any:
        return mask.value if isinstance(mask, StandIn) else mask

    changes = mask_questions(value_of)
    with replaced(changes):
        assert F._none_or_dtype(StandIn()) == torch.float32  # type: ignore[arg-type]
        assert not transformer._detect_is_causal_mask(StandIn())  # type: ignore[arg-type]
        assert transformer._detect_is_causal_mask(StandIn(), True)  # type: ignore[arg-type]
        assert transformer._detect_is_causal_mask(nn.Transformer.generate_square_subsequent_mask(3))
    assert [vars(owner)[name] is change for owner, name, change in changes] == [False, False]
    assert "_none_or_dtype" in inspect.getsource(nn.TransformerEncoder.forward)
    assert "_detect_is_causal_mask" in inspect.getsource(nn.TransformerEncoder.forward)


def test_reentrant_checkpoints_are_applied_by_a_function_that_tracing_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    class Instead:
        apply = staticmethod(lambda *args: ("replaced", args[2:]))

    monkeypatch.setattr(checkpoint, "CheckpointFunction", Instead)
    assert checkpoint.checkpoint(torch.exp, 1, use_reentrant=True) == ("replaced", (1,))


def test_tables_of_a_module_hold_its_state() -> None:
    norm = nn.BatchNorm1d(2)
    assert [*parameters_of(norm)] == ["weight", "bias"]
    assert [*buffers_of(norm)] == ["running_mean", "running_var", "num_batches_tracked"]
    assert [*children_of(nn.Sequential(norm))] == ["0"]
    stand_in = torch.empty(2, device="meta")
    give_tables(norm, {**parameters_of(norm), "weight": stand_in}, {})
    assert norm.weight is stand_in
    assert [*norm.buffers()] == []


@pytest.mark.parametrize("give", [share_state, copy_state])
def test_a_module_takes_the_state_of_another(give: Any) -> None:
    model, taker = nn.Sequential(nn.Linear(2, 2)), nn.Module()
    model.register_buffer("kept", torch.zeros(1), persistent=False)
    give(taker, model)
    assert [*taker.state_dict()] == [*model.state_dict()] == ["0.weight", "0.bias"]
    assert all(p is q for p, q in zip(taker.parameters(), model.parameters(), strict=True))
    assert [name for name, _ in taker.named_buffers()] == ["kept"]


def test_tensors_stand_in_for_a_part_that_two_names_lead_to() -> None:
    """torch.func.functional_call would leave the stand-in behind."""
    part = nn.Linear(2, 2)
    model = nn.ModuleDict({"first": part, "second": nn.ModuleDict({"again": part})})
    weight, stand_in = part.weight, nn.Parameter(torch.zeros(2, 2))
    with standing_in((model,), {id(weight): stand_in}):
        assert part.weight is stand_in
    assert part.weight is weight


def test_hooks_of_a_module_are_seen() -> None:
    module = nn.Tanh()
    assert not has_hooks(module)
    module.register_full_backward_hook(lambda *_: None)
    assert has_hooks(module)
    assert not has_forward_hooks(module)
    module.register_forward_pre_hook(lambda *_: None)
    assert has_forward_hooks(module)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_memory_is_told_apart_by_its_storage(device: str) -> None:
    x = torch.empty(4, 4, device=device)
    assert memory_key(x) == memory_key(x[1:]) == storage_key(x.untyped_storage())
    assert memory_key(x) != memory_key(torch.empty(4, 4, device=device))


def test_changes_in_place_are_counted_also_through_views() -> None:
    weight = nn.Parameter(torch.zeros(4))
    part, before = weight.detach()[1:], version_of(weight)
    with torch.no_grad():
        weight.add_(1)
    assert version_of(part) == version_of(weight) > before


def test_views_are_known() -> None:
    x = torch.ones(4)
    assert is_view(x[1:])
    assert not is_view(x)
    assert not is_view(x[1:].clone())


def shards() -> None:
    mesh = init_device_mesh("cpu", (1,))
    whole = torch.arange(4.0, requires_grad=True)
    made = DTensor.from_local(whole.detach(), mesh)
    assert memory_key(local_shard(made)) == memory_key(whole)
    assert local_shard(made).grad_fn is None


def blocks() -> None:
    """Rows 0, 1 and 4, 5 of 8 on the first of two ranks: two blocks, each cut in half."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0)
    mine = whole.view(2, 2, 2)[:, mesh.get_local_rank()].flatten()
    made = DTensor.from_local(mine, mesh, [in_blocks(0, 2)], run_check=False, shape=whole.shape, stride=whole.stride())
    if torch.__version__ >= "2.13":  # compared as versions; torch 2.11 cannot gather it; ConvMesh gathers boxes itself
        assert torch.equal(made.full_tensor(), whole)
    doubled: Any = made * 2
    assert doubled.placements == made.placements
    assert (cut_dim(made.placements[0]), blocks_of(made.placements[0])) == (0, 2)


def test_dtensors_are_cut_in_each_of_several_blocks(pools: dict[int, RankPool]) -> None:
    pools[2].run(blocks)


def test_a_dtensor_gives_its_memory(pools: dict[int, RankPool]) -> None:
    pools[1].run(shards)


class Marked(torch.Tensor):
    pass


def test_a_subclass_can_be_a_leaf_that_learns() -> None:
    made = as_subclass_leaf(Marked, torch.empty(2, device="meta"), True)
    assert type(made) is Marked
    assert made.is_leaf
    assert made.requires_grad


def test_many_tensors_are_scaled_and_measured_at_once() -> None:
    tensors = [torch.full((2,), 3.0), torch.full((2,), 4.0)]
    multiply_all_(tensors, torch.tensor(2.0))
    assert [norm.item() for norm in norms_of(tensors, float("inf"))] == [6.0, 8.0]


def test_many_tensors_are_copied_at_once_however_they_lie() -> None:
    plain = torch.arange(24.0).view(1, 2, 3, 4)
    sources = [plain, plain + 1, plain.contiguous(memory_format=torch.channels_last), torch.ones(2)]
    targets = [*(torch.zeros(1, 2, 3, 4) for _ in range(3)), torch.zeros(2, dtype=torch.float64)]
    copy_all_(targets, sources)
    assert all(torch.equal(target, source.to(target.dtype)) for target, source in zip(targets, sources, strict=True))
    copy_all_([], [])


def test_the_end_of_a_backward_calls_back_before_backward_returns() -> None:
    seen: list[Any] = []
    x = torch.ones(2, requires_grad=True)

    def hook(gradient: torch.Tensor) -> None:
        seen.append((backward_number() >= 0, running_node() is not None))
        at_end_of_backward(lambda: seen.append("end"))

    x.register_hook(hook)
    (x * 2).sum().backward()
    assert seen == [(True, True), "end"]
    assert running_node() is None


def test_a_node_without_a_graph_is_asked_for_its_inputs() -> None:
    x: Any = Doubled.apply(torch.ones(1, requires_grad=True))
    assert keeps_its_graph(x.grad_fn)
    assert not keeps_its_graph(None)


def test_a_dispatch_mode_sees_operators() -> None:
    class Names(TorchDispatchMode):
        names: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Names() as mode:
        torch.ones(2).relu()
    assert mode.names[-1] == "relu.default"
    assert issubclass(FakeTensor, torch.Tensor)


def test_a_trace_is_noticed_and_can_be_left() -> None:
    seen: list[bool] = []

    def work(x: torch.Tensor) -> torch.Tensor:
        seen.append(is_traced())
        with without_modes():
            seen.append(is_traced())
        return x * 2

    with FakeTensorMode() as mode:
        x = torch.empty(2)
    graph = make_fx(work, tracing_mode="fake")(mode.from_tensor(torch.ones(2))).graph
    assert isinstance(x, FakeTensor)
    assert (seen, is_traced()) == ([True, False], False)
    assert [node.name for node in graph.nodes if node.op == "call_function"] == ["mul"]
    assert tree_map_only(int, lambda n: n + 1, [1, "a"]) == [2, "a"]


def test_operators_that_return_views_are_known() -> None:
    aten = torch.ops.aten
    assert returns_views(aten.slice.Tensor)
    assert returns_views(aten.split.Tensor)
    assert not any(map(returns_views, (aten.add.Tensor, aten.add_.Tensor, len)))


def test_operators_tell_what_they_do_with_elements() -> None:
    aten = torch.ops.aten
    cast = aten._to_copy.default
    assert is_cast(cast)
    assert all(map(is_elementwise, (aten.relu.default, aten.threshold_backward.default, aten.add.Tensor, cast)))
    others = (aten.sum.default, aten.add_.Tensor, aten.view.default, aten.bernoulli.p, aten.convolution.default, len)
    assert not any(map(is_elementwise, others))


def test_nodes_tell_what_they_write_to() -> None:
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert writes_to(graph.call_function(torch.ops.aten.copy_.default, (x, y))) == [x]
    assert writes_to(graph.call_function(torch.ops.aten.add.out, (x, x), {"out": y})) == [y]
    assert writes_to(graph.call_function(torch.ops.aten.add.Tensor, (x, y))) == []


def test_a_graph_of_operators_is_compiled_and_frees_what_it_was_given() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, x)),))
    arguments = [torch.full((64,), 3.0)]
    compiled = compile_graph(fx.GraphModule({}, graph), list(arguments))
    (result,) = compiled(arguments)
    assert torch.equal(result, torch.full((64,), 9.0))
    assert arguments == []


def test_shapes_are_found_without_the_compiler() -> None:
    """In a process of its own, since others here load it; if a release breaks this, plans take a second longer."""
    code = (
        "import sys, torch; from convmesh.private_torch.shape_functions import leave_out_the_compiler\n"
        "assert leave_out_the_compiler() > 50\n"
        "x = torch.empty(4, 3, 8, 8, device='meta', requires_grad=True)\n"
        "torch.nn.BatchNorm2d(3, device='meta')(x).relu().mean().backward()\n"
        "assert 'torch._dynamo' not in sys.modules and x.grad.shape == x.shape"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_shapes_are_found_without_symbols() -> None:
    code = (
        "import sys, torch; from convmesh.private_torch.plain_numbers import leave_out_symbols\n"
        "leave_out_symbols()\n"
        "x = torch.empty(4, 3, 8, 8, device='meta')\n"
        "assert torch.nn.functional.max_pool2d(x, 2).shape == (4, 3, 4, 4)\n"
        "try: torch.nn.functional.max_pool2d(x, 2, padding=7)\n"
        "except RuntimeError as error: assert 'pad' in str(error)\n"
        "else: raise AssertionError('torch no longer refuses such a padding')\n"
        "assert 'sympy.core' not in sys.modules\n"
        "from torch.fx.experimental.symbolic_shapes import ShapeEnv\n"
        "assert 'sympy.core' in sys.modules and ShapeEnv() is not None\n"
        "import torch.fx.experimental.symbolic_shapes as real\n"
        "assert real.ShapeEnv is ShapeEnv and hasattr(real, '__file__')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_parts_of_a_module_come_once() -> None:
    shared = nn.ReLU()
    model = nn.Sequential(nn.Sequential(shared, nn.Linear(2, 2)), shared)
    assert {id(part) for part in parts_of(model)} == {id(part) for part in model.modules()}
    assert len(parts_of(model)) == 4


def test_registered_shape_functions_are_known() -> None:
    assert has_meta_kernel("relu")
    assert not has_meta_kernel("mkldnn_max_pool2d_backward")


def test_torch_tells_which_operators_autocast_looks_at() -> None:
    assert all(len(policies(kind)) > 100 for kind in KINDS)


def test_operators_on_tensors_without_data_are_cast() -> None:
    x = torch.ones(2, 2, device="meta")
    with meta_autocast(Cast("cuda", torch.float16)):
        assert (x @ x).dtype == torch.float16  # `tests/test_meta_autocast.py` has the others
    assert (x @ x).dtype == torch.float32


def test_exported_graphs_name_the_module_of_a_call() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Sequential(nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.part(x) + 1
            return y

    graph = torch.export.export(Net(), (torch.ones(2, 3),), strict=False).module().graph
    assert isinstance(graph, fx.Graph)
    calls = {node.target.__name__: node for node in graph.nodes if node.op == "call_function"}
    assert calling_module(calls["tanh.default"])[1] == "part.0"
    assert calling_module(calls["add.Tensor"])[1] == ""
    assert all(is_guard(node) for node in graph.nodes if node.op == "call_module")


def test_a_grad_scaler_unscales_where_a_subclass_can_change_it() -> None:
    class Seen(OpenGradScaler):
        def unscaled(self, *args: Any) -> Any:
            calls.append(len(args))
            return super().unscaled(*args)

    calls: list[int] = []
    parameter = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), Seen("cpu", init_scale=4.0)
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    assert calls == [4]
    assert parameter.grad is not None
    assert parameter.grad.item() == 1.0


def test_backward_of_a_stage_comes_in_two_parts() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    gradients, groups = stage_backward_input([layer(x)], [torch.ones(1, 2)], [x], iter(layer.parameters()))
    assert gradients[0] is not None
    assert layer.weight.grad is None
    stage_backward_weight(iter(layer.parameters()), groups)
    assert layer.weight.grad is not None


def test_later_stages_send_zeros_where_there_is_no_gradient() -> None:
    assert needs_every_gradient() == (torch.__version__ < "2.12")


def test_stages_of_a_pipeline_have_the_methods_that_ours_override() -> None:
    from torch.distributed.pipelining import PipelineStage

    for name, arguments in {
        "forward_one_chunk": ["fwd_chunk_id"],
        "get_fwd_send_ops": ["fwd_chunk_id"],
        "get_bwd_send_ops": ["bwd_chunk_id"],
        "backward_one_chunk": ["bwd_chunk_id", "loss"],
        "backward_weight_one_chunk": ["bwd_chunk_id"],
    }.items():
        taken = [*inspect.signature(getattr(PipelineStage, name)).parameters]
        assert taken[1 : 1 + len(arguments)] == arguments, name


def test_transforms_run_by_the_known_kernels() -> None:
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    seen: set[Any] = set()
    with Seen():
        torch.fft.ifftn(torch.fft.fftn(torch.fft.irfftn(torch.fft.rfftn(torch.ones(4, 4)))))
    assert seen >= FOURIER_KERNELS


def test_an_allocator_can_be_told_that_a_capture_is_over() -> None:
    assert callable(torch._C._cuda_endAllocateToPool), "capturing: after a capture that failed"


PRIVATE_OF = (nn.Module(), torch.Tensor(), torch.UntypedStorage(), DTensor, torch.ops.aten.relu.default)
TORCHS = {name for owner in PRIVATE_OF for name in dir(owner) if name.startswith("_") and not name.endswith("__")}
"""Private names of the torch objects that code meets most."""


def private_uses(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    foreign = TORCHS - {*own_names(tree)}
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, (ast.ImportFrom, ast.Attribute, ast.Constant)) else ""
        if isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            is_bad = names[0] == "torch" and any(map(_is_private, names))
        elif isinstance(node, ast.Attribute):
            is_bad = node.attr in foreign or (text.startswith("torch.") and _is_private(node.attr))
        else:
            is_bad = isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in foreign
        if is_bad:
            yield f"{path}:{node.lineno}: {text}"  # type: ignore[attr-defined]


def own_names(tree: ast.AST) -> Iterator[str]:
    """Names that a file gives to attributes and functions of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr
        elif isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not _is_python(name)


def _is_python(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def test_no_other_module_uses_a_private_part_of_torch() -> None:
    files = [path for path in SOURCE.rglob("*.py") if "private_torch" not in path.parts]
    assert len(files) > 300
    assert [use for path in files for use in private_uses(path)] == []


def test_a_private_use_would_be_found(tmp_path: Path) -> None:
    lines = ["from torch.utils._pytree import tree_map", "torch._C.f()", "module._buffers", "getattr(x, '_modules')"]
    (tmp_path / "bad.py").write_text("\n".join([*lines, "self._own = self._own"]))
    assert sorted({use.split(":")[1] for use in private_uses(tmp_path / "bad.py")}) == ["1", "2", "3", "4"]


class AsksWhatRuns(torch.autograd.Function):
    """Notes whether the node that adds to a leaf's gradient will run, and gives the leaf none."""

    seen: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        ctx.node = torch.autograd.graph.get_gradient_edge(leaf).node
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        AsksWhatRuns.seen.append(will_run(ctx.node))
        return grads[0], None


def test_backward_tells_what_it_will_run_and_calls_hooks_without_a_gradient() -> None:
    x, leaf = (torch.ones((), requires_grad=True) for _ in range(2))
    node, seen = torch.autograd.graph.get_gradient_edge(leaf).node, []
    assert hooks_on_gradient(leaf) == 0
    node.register_prehook(lambda grads: seen.append(grads[0]))
    leaf.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad))
    AsksWhatRuns.apply(x, leaf).backward()
    assert seen == [None, None]
    assert hooks_on_gradient(leaf) == 1
    AsksWhatRuns.apply(x, leaf).backward(inputs=[x])
    torch.autograd.grad(AsksWhatRuns.apply(x, leaf), [x, leaf], allow_unused=True)
    assert AsksWhatRuns.seen == [True, False, False]
    leaf.register_hook(torch.neg)
    assert hooks_on_gradient(leaf) == 2


def test_attention_kernels_return_what_merging_needs() -> None:
    q, k, v = (torch.randn(2, 3, tokens, 8, dtype=torch.float64) for tokens in (5, 7, 7))
    made, sums = attention_kernels.cpu_forward(q, k, v, None, False, 0.5)
    scores = q @ k.mT * 0.5
    torch.testing.assert_close(made, torch.softmax(scores, -1) @ v)
    torch.testing.assert_close(sums, scores.logsumexp(-1))
    hidden = torch.full((5, 7), -torch.inf, dtype=torch.float64)
    assert not attention_kernels.cpu_forward(q, k, v, hidden, False, 0.5)[0].any()


def test_attention_kernels_of_gpus_take_these_arguments() -> None:
    q, k, v = (torch.empty(2, 3, tokens, 16, dtype=torch.bfloat16, device="meta") for tokens in (5, 7, 7))
    made, sums = attention_kernels.cuda_forward(q, k, v, False, 0.5)
    assert (made.shape, sums.shape) == (q.shape, q.shape[:-1])
    found = attention_kernels.cuda_backward(made, q, k, v, made, sums, False, 0.5)
    assert [gradient.shape for gradient in found] == [x.shape for x in (q, k, v)]


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.float64), ("cuda", torch.float32), ("cuda", torch.bfloat16)]
)
def test_a_dry_run_names_one_kernel_that_keeps_no_scores(device: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.empty(2, 3, 32, 16, dtype=dtype, device="meta", requires_grad=True) for _ in range(3))
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()), lambda t: t):
        made = attention_kernels.without_data(q, k, v, None, True, None, device)
    assert made.shape == q.shape
    assert max(kept) == q.numel()
    assert attention_kernels.without_data(q, k, v, None, True, None, "other") is None
