"""Nothing from a disk or a network is unpickled: a prepared file or a stranger's message runs no code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import convmesh

SOURCE = Path(convmesh.__file__).parent

PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}

OBJECTS = "_object", "_object_list", "_object_input_list"
"""How the collectives end that send any object."""

CONNECTIONS = {"Client", "Listener"}
"""What receives objects over a network."""

_TORCHS = "torch.distributed.checkpoint"

KNOWN = {
    # Pipes to processes that this one has started.
    "testing/ranks.py: pickle",
    "verification/fresh_process.py: pickle",
    # Torch's own checkpoints, an explicit import, whose page and docstring say so.
    "checkpoint/torch_format.py: torch.distributed.checkpoint",
    # Lightning's own interface sends any object between ranks, and its other strategies do so in the same way.
    "lightning/mesh_strategy.py: dist.broadcast_object_list",
    "lightning/job.py: dist.broadcast_object_list",
    # A file that verify has just written for its own ranks, read with weights_only.
    "verification/single_process.py: torch.load(weights_only=True)",
}


def uses(path: Path) -> Iterator[str]:
    """What in a file could unpickle."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            yield from (name for name in modules if name.partition(".")[0] in PICKLES)
            yield from (_TORCHS for name in modules if name.startswith(_TORCHS))
            yield from (f"{modules[0]}: {name}" for name in names if modules != names and _unpickles(modules[0], name))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield from call(node, node.func)


def call(node: ast.Call, func: ast.Attribute) -> Iterator[str]:
    owner, given = ast.unparse(func.value), {word.arg: ast.unparse(word.value) for word in node.keywords}
    if func.attr.endswith(OBJECTS) and owner != "self":
        yield f"{owner}.{func.attr}"
    if func.attr == "read_pickle":
        yield f"{owner}.read_pickle"
    if func.attr == "load" and owner == "torch":
        yield "torch.load(weights_only=True)" if given.get("weights_only") == "True" else "torch.load"
    if func.attr == "load" and owner in ("np", "numpy") and given.get("allow_pickle", "False") != "False":
        yield "numpy.load(allow_pickle)"


def _unpickles(module: str, name: str) -> bool:
    """Whether a function that is imported by its name, and then called without its module, unpickles."""
    if module.startswith("torch") and not module.startswith(_TORCHS):
        return name == "load" or name.endswith(OBJECTS)
    return name == "read_pickle" or (module.startswith("multiprocessing") and name in CONNECTIONS)


def test_every_use_is_known() -> None:
    seen = {f"{path.relative_to(SOURCE)}: {use}" for path in SOURCE.rglob("*.py") for use in uses(path)}
    assert seen == KNOWN


@pytest.mark.parametrize(
    ("code", "use"),
    [
        ("import pickle", "pickle"),
        ("from dill import loads", "dill"),
        ("torch.load(f)", "torch.load"),
        ("torch.load(f, weights_only=False)", "torch.load"),
        ("np.load(f, allow_pickle=True)", "numpy.load(allow_pickle)"),
        ("dist.all_gather_object(a, b)", "dist.all_gather_object"),
        ("torch.distributed.broadcast_object_list(a)", "torch.distributed.broadcast_object_list"),
        ("c10d.all_gather_object(a, b)", "c10d.all_gather_object"),
        ("from torch.distributed import scatter_object_input_list", "torch.distributed: scatter_object_input_list"),
        ("from torch import load", "torch: load"),
        ("from torch.serialization import load as read", "torch.serialization: load"),
        ("from multiprocessing.connection import Client", "multiprocessing.connection: Client"),
        ("pandas.read_pickle(f)", "pandas.read_pickle"),
    ],
)
def test_uses_are_noticed(code: str, use: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(code)
    assert [*uses(tmp_path / "module.py")] == [use]
