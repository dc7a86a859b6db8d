"""Every error that a user can cause. Each message names the argument, its value, the rule and the nearest fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConvMeshError(Exception):
    """Base of all errors that ConvMesh raises on purpose."""


class MeshError(ConvMeshError, ValueError):
    """A mesh that is malformed or does not fit the processes at hand."""


class LayoutError(ConvMeshError, ValueError):
    """A layout, partition or shard that contradicts its tensor or its mesh."""


class UnsupportedError(ConvMeshError, NotImplementedError):
    """An operator or option that has no split version; the message says what has one."""


class OperatorError(ConvMeshError):
    """A torch function that fails on a Sharded tensor. Also an error of the kind that torch itself would raise."""

    @staticmethod
    def of(name: str, operands: str, error: Exception) -> OperatorError:
        """The error for a call of `name`, which failed with `error`."""
        kind = next((ours for theirs, ours in _OPERATOR_ERRORS.items() if isinstance(error, theirs)), None)
        told = str(error).rstrip(".") or type(error).__name__
        return (kind or OperatorRuntimeError)(
            f"`{name}` on {operands}: {told}. The same call must work on the whole tensor, `x.gather()`."
        )


class OperatorTypeError(OperatorError, TypeError):
    """An argument of a type that the function does not take."""


class OperatorIndexError(OperatorError, IndexError):
    """A dim or an index out of range."""


class OperatorValueError(OperatorError, ValueError):
    """An argument of a value or shape that the function does not take."""


class OperatorRuntimeError(OperatorError, RuntimeError):
    """Any other failure, such as one of autograd."""


_OPERATOR_ERRORS: dict[type[Exception], type[OperatorError]] = {
    TypeError: OperatorTypeError,
    AttributeError: OperatorTypeError,
    IndexError: OperatorIndexError,
    ValueError: OperatorValueError,
    LookupError: OperatorValueError,
    ArithmeticError: OperatorValueError,
}


class DisagreementError(ConvMeshError, RuntimeError):
    """Ranks that should have the same plan, mesh or shards do not."""


class LostRankError(ConvMeshError, ConnectionError):
    """Another rank has ended, hangs, or cannot be reached: nothing is wrong with this one, and the run can go on."""


class UnknownNameError(ConvMeshError, LookupError):
    """A name that means nothing here; the message offers the nearest names that do."""

    @classmethod
    def of(cls, argument: str, name: object, known: Iterable[str]) -> UnknownNameError:
        """The error for a `name` that is not among the `known` ones."""
        known = sorted(known)
        nearest = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
        offer = f"Did you mean {' or '.join(nearest)}?" if nearest else f"There are: {', '.join(known) or 'none'}."
        return cls(f"`{argument}` (={name!r}) is unknown. {offer}")


class CaptureError(ConvMeshError, ValueError):
    """A model that cannot be captured: it is not a module, or it fails on the sample."""


class CaptureWarning(UserWarning):
    """Something about the model that its capture does not preserve."""


class OpaqueLayerWarning(CaptureWarning):
    """A layer that capture cannot look into: only its samples can be cut."""


class PlanError(ConvMeshError, ValueError):
    """A plan that contradicts itself, its network or its mesh."""


class InfeasibleError(ConvMeshError, ValueError):
    """No plan fits the network, the ranks and their memory; the message says why each kind does not."""


class ShapeError(ConvMeshError, ValueError):
    """A sample, target or weight with another shape than the plan was made for."""


class LabelError(ConvMeshError, IndexError):
    """A class label outside the classes that is not ignored, raised on every rank."""


class NonFiniteLossError(ConvMeshError, ArithmeticError):
    """A loss that is not a number, found on every rank."""


class SystemFileError(ConvMeshError, ValueError):
    """A description of a cluster that cannot be read; the message names every wrong key of it."""


class RunsFileError(ConvMeshError, ValueError):
    """A file of measured runs that cannot be used; the message names every wrong row and column."""


class DataError(ConvMeshError, ValueError):
    """Samples that cannot be read or used: a missing file, a wrong name, shapes that differ, a broken chunk, NaN."""


class DataWarning(UserWarning):
    """Samples that can be read, but at a cost that a conversion would save."""


class CheckpointError(ConvMeshError, RuntimeError):
    """A checkpoint that could not be written, or cannot be read; raised on every rank."""


class CheckpointWarning(UserWarning):
    """A damaged checkpoint that was skipped for an older one."""


class ConfigError(ConvMeshError, ValueError):
    """A run file or flag that cannot be used; the message names every wrong key of it."""


class RunError(ConvMeshError, RuntimeError):
    """A run that cannot start or go on: its folder is in use, or a rank met an error that ends all of them."""


class UnwritableError(RunError, CheckpointError):
    """What a run has to save cannot be written: the disk is full or read-only. It can go on once that is over."""
