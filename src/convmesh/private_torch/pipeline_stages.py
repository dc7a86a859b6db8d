"""Backward of a pipeline's stage in two parts: the zero-bubble schedules call these, and so must a dry run of one."""

from torch.distributed.pipelining._backward import stage_backward_input as stage_backward_input
from torch.distributed.pipelining._backward import stage_backward_weight as stage_backward_weight
