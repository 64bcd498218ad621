"""Stand-ins for the kernels of Mamba-2 (the package mamba_ssm) and for einops, in plain torch.

Importing this module puts them into ``megatron.core.ssm.mamba_mixer``, which takes both packages for absent
on a machine without them.  The scan goes token by token; like the kernel that it stands for
(``MambaSplitConv1dScanCombinedFn`` in mamba_ssm/ops/triton/ssd_combined.py) it saves the input of the
convolution and the scan's result before the gate, and computes everything else again in the backward.
"""

from typing import Any

import torch
from megatron.core.ssm import mamba_context_parallel, mamba_mixer
from torch.nn import functional


def rearrange(tensor: torch.Tensor, pattern: str) -> torch.Tensor:
    """Return ``tensor`` with its dimensions in the order of ``pattern``, such as "l b d -> b l d".

    A dimension 1 on the left is dropped; einops' other patterns are not here.
    """
    before, after = (side.split() for side in pattern.split("->"))
    if "1" in before:
        tensor = tensor.squeeze(before.index("1"))
        before.remove("1")
    return tensor.permute([before.index(name) for name in after])


def _scanned(
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    step_bias: torch.Tensor,
    decay: torch.Tensor,
    skip: torch.Tensor,
    groups: int,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scan's result before the gate, and the gate; arXiv 2405.21060, section 2 and figure 6.

    ``projected`` is (batch, tokens, gate + x + B + C + steps) and ``decay`` one number a head of ``width``.
    """
    heads, channels = decay.shape[0], weight.shape[0]
    inner = heads * width
    state_size = (channels - inner) // (2 * groups)
    gate, mixed, steps = projected.split([inner, channels, heads], -1)
    convolved = functional.conv1d(
        mixed.transpose(1, 2), weight[:, None], bias, padding=weight.shape[1] - 1, groups=channels
    )
    mixed = functional.silu(convolved[..., : projected.shape[1]]).transpose(1, 2)
    values, into, out_of = mixed.split([inner, groups * state_size, groups * state_size], -1)
    values = values.unflatten(-1, (heads, width)).float()
    into, out_of = (
        part.unflatten(-1, (groups, state_size)).repeat_interleave(heads // groups, 2).float()
        for part in (into, out_of)
    )
    steps = functional.softplus(steps.float() + step_bias)
    state = values.new_zeros(*values.shape[:1], heads, width, state_size)
    results = []
    for token in range(values.shape[1]):
        step = steps[:, token, :, None, None]
        added = values[:, token, :, :, None] * into[:, token, :, None, :]
        state = state * torch.exp(step * decay[:, None, None]) + step * added
        results.append((state * out_of[:, token, :, None, :]).sum(-1))
    result = torch.stack(results, 1) + skip[:, None] * values
    return result.flatten(-2).to(projected.dtype), gate


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, groups: int, width: int, *operands: torch.Tensor) -> torch.Tensor:
        result, gate = _scanned(*operands, groups, width)
        ctx.sizes = groups, width
        ctx.save_for_backward(*operands, result)
        return result * functional.silu(gate)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        operands = [saved.detach().requires_grad_() for saved in ctx.saved_tensors[:-1]]
        with torch.enable_grad():
            result, gate = _scanned(*operands, *ctx.sizes)
            output = result * functional.silu(gate)
        return (None, None, *torch.autograd.grad(output, operands, gradient))


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    headdim: int,
    ngroups: int,
    **unused: Any,
) -> torch.Tensor:
    """Convolve, scan and gate, as mamba_ssm's function of this name."""
    return _Scan.apply(ngroups, headdim, zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D)


class _Normed(torch.autograd.Function):
    """Saves its input and weight, as mamba_ssm's kernel does, and no intermediate result."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, group: int, eps: float) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.sizes = group, eps
        return _normed(input, weight, group, eps)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        operands = [saved.detach().requires_grad_() for saved in ctx.saved_tensors]
        with torch.enable_grad():
            output = _normed(*operands, *ctx.sizes)
        return (*torch.autograd.grad(output, operands, gradient), None, None)


def _normed(input: torch.Tensor, weight: torch.Tensor, group: int, eps: float) -> torch.Tensor:
    parts = input.float().unflatten(-1, (-1, group))
    scaled = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + eps)
    return (scaled.flatten(-2) * weight.float()).to(input.dtype)


class GroupedNorm(torch.nn.Module):
    """The root-mean-square norm of each group of the scan's result, as mamba_ssm's RMSNorm without a gate."""

    def __init__(
        self, size: int, eps: float, group_size: int, norm_before_gate: bool, device: Any, dtype: Any
    ):
        super().__init__()
        self.eps, self.group_size = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _Normed.apply(input, self.weight, self.group_size, self.eps)


mamba_mixer.HAVE_MAMBA_SSM = mamba_mixer.HAVE_EINOPS = mamba_context_parallel.HAVE_EINOPS = True
mamba_mixer.rearrange = rearrange
mamba_mixer.mamba_split_conv1d_scan_combined = mamba_split_conv1d_scan_combined
mamba_mixer.ExtendedRMSNorm = GroupedNorm
