"""What torch.export writes into its graphs, undocumented."""

from __future__ import annotations

from torch import fx


def is_guard(node: fx.Node) -> bool:
    """Whether a node checks inputs against the exported shapes; our graphs have their own checks."""
    return node.op == "call_module" and node.target == "_guards_fn"


def calling_module(node: fx.Node) -> tuple[str, str]:
    """The module call that made a node: a unique key and the module's path, both empty for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    key, (path, _) = next(reversed(stack.items()), ("", ("", None)))
    return (key, path.split("@")[0]) if not key.startswith("_empty") else ("", "")
