"""How torch reads the arguments of `Tensor.to`, as `nn.Module.to` does: device, dtype, non_blocking, memory_format."""

from torch._C._nn import _parse_to as parse_to

__all__ = ["parse_to"]
