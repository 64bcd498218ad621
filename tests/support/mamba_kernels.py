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
    state: torch.Tensor | None,
    groups: int,
    width: int,
    documents: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the scan's result before the gate, the gate, and the state after the last token.

    See arXiv 2405.21060, section 2 and figure 6.  ``projected`` is (batch, tokens, gate + x + B + C + steps)
    and ``decay`` one number a head of ``width``; ``state`` is that before the first token, and ``documents``
    numbers the document of each token, none of which sees another.
    """
    heads, channels = decay.shape[0], weight.shape[0]
    inner = heads * width
    state_size = (channels - inner) // (2 * groups)
    gate, mixed, steps = projected.split([inner, channels, heads], -1)
    taps = weight.shape[1] - 1
    windows = functional.pad(mixed, (0, 0, taps, 0)).unfold(1, taps + 1, 1)
    if documents is not None:
        of_inputs = functional.pad(documents, (taps, 0), value=-1).unfold(1, taps + 1, 1)
        windows = windows * (of_inputs == documents[..., None])[:, :, None]
    mixed = functional.silu((windows * weight).sum(-1) + bias)
    values, into, out_of = mixed.split([inner, groups * state_size, groups * state_size], -1)
    values = values.unflatten(-1, (heads, width)).float()
    into, out_of = (
        part.unflatten(-1, (groups, state_size)).repeat_interleave(heads // groups, 2).float()
        for part in (into, out_of)
    )
    steps = functional.softplus(steps.float() + step_bias)
    if state is None:
        state = values.new_zeros(*values.shape[:1], heads, width, state_size)
    results = []
    for token in range(values.shape[1]):
        if documents is not None and token:
            state = state * (documents[:, token] == documents[:, token - 1])[:, None, None, None]
        step = steps[:, token, :, None, None]
        added = values[:, token, :, :, None] * into[:, token, :, None, :]
        state = state * torch.exp(step * decay[:, None, None]) + step * added
        results.append((state * out_of[:, token, :, None, :]).sum(-1))
    result = torch.stack(results, 1) + skip[:, None] * values
    return result.flatten(-2).to(projected.dtype), gate, state


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, about: tuple[Any, ...], *operands: torch.Tensor | None) -> Any:
        result, gate, state = _scanned(*operands, *about)
        ctx.about = about
        ctx.save_for_backward(*operands, result)
        return result * functional.silu(gate), state

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *saved, _ = ctx.saved_tensors
        operands = [tensor if tensor is None else tensor.detach().requires_grad_() for tensor in saved]
        with torch.enable_grad():
            result, gate, state = _scanned(*operands, *ctx.about)
            output = result * functional.silu(gate)
        leaves = [tensor for tensor in operands if tensor is not None]
        results = iter(torch.autograd.grad((output, state), leaves, gradients))
        return None, *(None if tensor is None else next(results) for tensor in operands)


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
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    seq_idx: torch.Tensor | None = None,
    **unused: Any,
) -> Any:
    """Convolve, scan and gate, as mamba_ssm's function of this name."""
    about = ngroups, headdim, seq_idx
    operands = zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, initial_states
    result, state = _Scan.apply(about, *operands)
    return (result, state) if return_final_states else result


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
