"""Every error that a user can cause. Each message names the argument, its value, the rule and the nearest fix."""


class ConvMeshError(Exception):
    """Base of all errors that ConvMesh raises on purpose."""


class MeshError(ConvMeshError, ValueError):
    """A mesh that is malformed or does not fit the processes at hand."""


class LayoutError(ConvMeshError, ValueError):
    """A layout, partition or shard that contradicts its tensor or its mesh."""


class UnsupportedError(ConvMeshError, NotImplementedError):
    """An operator or option that has no split version; the message says what has one."""


class DisagreementError(ConvMeshError, RuntimeError):
    """Ranks that ought to hold the same plan, mesh or shards do not."""
