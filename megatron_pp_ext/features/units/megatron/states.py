"""Recurrent layers on slices, Mamba-2 and gated delta nets, and the indexers of sparse attention.

The state after a slice enters the next one's forward, and its gradient comes back in input gradients, which
run in reverse.  So do the last inputs of the convolution before the recurrence; a slice with fewer tokens
hands on the rest of what it got.  An indexer chooses among the keys of a whole sequence, so that it has a
storage of its own keys as attention has (``units.runtime.Prefix``).  Layers are the model's own, with methods
of the instance replaced; those do what they did unless a slice of several runs (``units.runtime``).
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from megatron_pp_ext.features.units.options import SLICE_FLAG
from megatron_pp_ext.features.units.runtime import Sequence, Slice, running

_NO_STEP = -1e4
"""A step of Mamba-2 whose softplus is 0: the state neither decays nor grows, and no gradient passes."""

_MAMBA = "_ssm_training"
"""The method of a Mamba-2 mixer between its products: convolution, scan, and norm."""

_DELTA = "_prepare_input_for_gated_delta_rule", "_prepare_qkv_for_gated_delta_rule"
"""The method of a gated delta net that gets the convolution's results, and its name in megatron-core 0.18."""


def is_recurrent(module: torch.nn.Module) -> bool:
    """Whether ``module`` is a Mamba-2 mixer or a gated delta net of Megatron's, or of a class made of one."""
    return _is_mamba(module) or _is_delta(module)


def _is_mamba(module: torch.nn.Module) -> bool:
    return _is_of(module, "MambaMixer")


def _is_delta(module: torch.nn.Module) -> bool:
    return _is_of(module, "GatedDeltaNet") or _is_of(module, "_GDNBase")


def _is_of(module: torch.nn.Module, name: str) -> bool:
    kinds = type(module).__mro__
    return any(kind.__name__ == name and kind.__module__.startswith("megatron.core.ssm.") for kind in kinds)


def carry_states(module: torch.nn.Module) -> str:
    """Let the recurrent layer ``module`` hand on its state; return why it cannot, empty where it can."""
    if _is_mamba(module):
        if not module.use_mem_eff_path:
            return (
                "slices of sequences hand states to Mamba-2's fused kernel, which "
                f"--disable-mamba-mem-eff-path leaves out; leave out that flag, or {SLICE_FLAG}"
            )
        names: tuple[str, ...] = (_MAMBA,)
        replacement: Callable[..., Any] = _scan
    else:
        names, replacement = _DELTA, _convolved
    name = next((name for name in names if hasattr(module, name)), None)
    if name is None or not (_is_mamba(module) or hasattr(module, "gated_delta_rule")):
        return (
            f"slices of sequences do not know how this release of Megatron calls {type(module).__name__}, "
            f"whose state they hand on; take megatron-core 0.18 or later, or leave out {SLICE_FLAG}"
        )
    _replace(module, name, replacement)
    if _is_delta(module):
        _replace(module, "gated_delta_rule", _delta_rule)
        projection: Any = module.in_proj
        if _note not in projection._forward_hooks.values():
            projection.register_forward_hook(_note)
    return ""


def _replace(module: torch.nn.Module, name: str, replacement: Callable[..., Any]) -> None:
    """Let ``replacement`` be called with ``module`` and its own method before the arguments."""
    stock = getattr(module, name)
    if getattr(stock, "func", None) is not replacement:
        setattr(module, name, partial(replacement, module, stock))


def _sliced() -> tuple[Slice, Sequence] | None:
    """Return the slice that runs, and what it shares with others; None for a whole sequence or a pack."""
    part = running()
    return None if part is None or part.sequence is None else (part, part.sequence)


def _scan(
    module: Any, stock: Callable[..., torch.Tensor], zxBCdt: torch.Tensor, packed_seq_params: Any = None
) -> torch.Tensor:
    """Convolve and scan a slice of a sequence: (tokens, batch, gate + x + B + C + steps) of all its tokens.

    The kernel (``mamba_split_conv1d_scan_combined`` of mamba_ssm) gets the state, but no inputs before its
    first.  So these come as tokens of their own, whose step of 0 leaves the state as it is.
    """
    sliced = _sliced()
    if sliced is None:
        return stock(zxBCdt, packed_seq_params)
    from megatron.core.ssm import mamba_mixer as kernels

    part, sequence = sliced
    heads, before = module.cp, module.d_conv - 1
    inputs = zxBCdt.transpose(0, 1)
    convolved = inputs[..., heads.d_inner_local_tpcp : -heads.nheads_local_tpcp]
    graph = _in_graph(module, zxBCdt)
    tail = sequence.entered((module, "inputs"), part.start, graph)
    state = sequence.entered((module, "state"), part.start, graph)
    rest = _last(convolved, tail, before)
    if tail is not None:
        gate = tail.new_zeros(*tail.shape[:2], heads.d_inner_local_tpcp)
        steps = tail.new_full((*tail.shape[:2], heads.nheads_local_tpcp), _NO_STEP)
        inputs = torch.cat([torch.cat([gate, tail, steps], -1), inputs], 1)
    skip = heads.get_D()
    if module.D_has_hdim:
        skip = skip.float().unflatten(0, (-1, module.headdim))
    types = {}
    if getattr(kernels, "MAMBA_HAS_STATE_DTYPE", False):
        types["state_dtype"] = module.mamba_training_ssm_states_dtype
    result, after = kernels.mamba_split_conv1d_scan_combined(
        inputs.contiguous(),
        heads.get_conv1d_weight().squeeze(1),
        heads.get_conv1d_bias(),
        heads.get_dt_bias().float(),
        -torch.exp(heads.get_A_log().float()),
        D=skip,
        chunk_size=module.chunk_size,
        activation=module.activation,
        headdim=None if module.D_has_hdim else module.headdim,
        ngroups=heads.ngroups_local_tpcp,
        norm_before_gate=module.norm_before_gate,
        initial_states=state,
        return_final_states=True,
        **types,
    )
    if tail is not None:
        result = result[:, before:]
    result = sequence.handed_on((module, "inputs"), rest, part.end, result)
    result = sequence.handed_on((module, "state"), after, part.end, result)
    result = heads.post_conv_ssm(result.transpose(0, 1).contiguous(), packed_seq_params)
    return module.norm(result) if module.rmsnorm else result


def _in_graph(module: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return a tensor through which the gradient of a state passes, also where that of the inputs does not.

    A layer whose inputs and first product are frozen may still train the weights of its recurrence.
    """
    if inputs.requires_grad or not any(weight.requires_grad for weight in module.parameters()):
        return inputs
    return inputs.new_empty(0).requires_grad_()


def _last(inputs: torch.Tensor, earlier: torch.Tensor | None, count: int) -> torch.Tensor:
    """Return the last ``count`` of the inputs so far, along dimension 1; there are zeros before the first."""
    last = inputs[:, -count:] if count else inputs[:, :0]
    missing = count - last.shape[1]
    if not missing:
        return last
    if earlier is None:
        return functional.pad(last, (0, 0, missing, 0))
    return torch.cat([earlier[:, -missing:], last], 1)


def _note(module: torch.nn.Module, args: Any, output: Any) -> None:
    """Keep what the convolution of a delta net gets until it has been (``_convolved``)."""
    if _sliced() is not None:
        module.convolution_inputs = output[0]


def _convolved(
    module: Any, stock: Callable[..., Any], qkv: torch.Tensor, *arguments: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Give the first of the convolution's results ``qkv``, (batch, tokens, size), the inputs before a slice.

    Megatron convolves a slice as if there were zeros before it.  So only as many of its results are wrong as
    the convolution has inputs besides the last.
    """
    sliced = _sliced()
    if sliced is None:
        prepared: tuple[torch.Tensor, ...] = stock(qkv, *arguments)
        return prepared
    part, sequence = sliced
    inputs = module.in_proj.convolution_inputs.transpose(0, 1)[..., : qkv.shape[-1]]
    del module.in_proj.convolution_inputs
    before = module.conv_kernel_dim - 1
    tail = sequence.entered((module, "inputs"), part.start, _in_graph(module, inputs))
    if tail is not None:
        first = torch.cat([tail, inputs[:, :before]], 1).transpose(1, 2).float()
        weight, bias = module.conv1d.weight.float(), module.conv1d.bias
        results = functional.conv1d(first, weight, None if bias is None else bias.float(), groups=len(weight))
        results = module.act_fn(results).transpose(1, 2).to(qkv.dtype)
        qkv = torch.cat([results, qkv[:, results.shape[1] :]], 1)
    qkv = sequence.handed_on((module, "inputs"), _last(inputs, tail, before), part.end, qkv)
    prepared = stock(qkv, *arguments)
    return prepared


def _delta_rule(module: Any, stock: Callable[..., Any], *operands: torch.Tensor, **named: Any) -> Any:
    """Call the rule of a delta net with the state before a slice, and hand on the one after it."""
    sliced = _sliced()
    if sliced is None:
        return stock(*operands, **named)
    part, sequence = sliced
    graph = _in_graph(module, operands[0])
    named["initial_state"] = sequence.entered((module, "state"), part.start, graph)
    result, after = stock(*operands, **{**named, "output_final_state": True})
    return sequence.handed_on((module, "state"), after, part.end, result), None


_SPARSE = "megatron.core.transformer.experimental_attention_variant.dsa"


def is_sparse(attention: torch.nn.Module) -> bool:
    """Whether ``attention`` is Megatron's sparse attention, whose indexer chooses keys."""
    return any(kind.__module__ == _SPARSE for kind in type(attention).__mro__)


def share_indexer(attention: Any) -> str:
    """Let the indexer of sparse ``attention`` choose among earlier keys; return why it cannot, if so."""
    config = attention.config
    if not hasattr(attention, "index_share") or attention.index_share:
        return (
            "slices of sequences need an indexer in each layer of sparse attention, by megatron-core 0.19 or "
            f"later; leave out --dsa-indexer-topk-freq, or {SLICE_FLAG}"
        )
    if getattr(config, "dsa_kernel_backend", "none") != "none":
        return (
            f"the kernels of --dsa-kernel-backend {config.dsa_kernel_backend} know no keys before the first "
            f"query, as slices of sequences have; leave it out, or {SLICE_FLAG}"
        )
    if config.sequence_parallel and config.tensor_model_parallel_size > 1:
        return (
            "sparse attention takes as many keys as queries under --sequence-parallel, and a slice of a "
            f"sequence has more; leave it out, or {SLICE_FLAG}"
        )
    _replace(attention.indexer, "forward_before_topk", _with_earlier_keys)
    return ""


def _with_earlier_keys(
    module: torch.nn.Module, stock: Callable[..., Any], *arguments: Any, **named: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return an indexer's queries, its keys up to the slice's end, and its weights."""
    query, key, weights = stock(*arguments, **named)
    if (sliced := _sliced()) is not None:
        part, sequence = sliced
        key = sequence.grown((module, "key"), key, part.start)
    return query, key, weights


def mask_of_sparse(arguments: dict[str, Any], mask: torch.Tensor) -> None:
    """Let sparse attention read the ``mask`` of a slice, in place of one that it makes by its kind."""
    queries, batch = arguments["query"].shape[:2]
    arguments["attn_mask_type"] = None
    arguments["attention_mask"] = mask.expand(batch, 1, queries, mask.shape[-1])


@contextmanager
def indexers_count(share: float, config: Any, is_backward: bool) -> Iterator[None]:
    """Let the losses of indexers in a slice count by its ``share`` of its microbatch's tokens.

    As those of routers (``sliced_stage.of_part``) they are means over tokens, in the log and in gradients,
    whose scale Megatron sets in every forward.  Where losses are counted by tokens they are sums.
    """
    sparse = sys.modules.get(_SPARSE)
    if sparse is None or config.calculate_per_token_loss:
        yield
        return
    scaler, tracker = sparse.DSAIndexerLossAutoScaler, sparse.DSAIndexerLossLoggingHelper.tracker
    scale, before = scaler.main_loss_backward_scale, tracker.get("values")
    before = 0 if before is None else before.clone()
    if is_backward:  # 1 where nobody has set it
        scaler.main_loss_backward_scale = torch.tensor(share) if scale is None else scale * share
    try:
        yield
    finally:
        if is_backward:
            scaler.main_loss_backward_scale = scale
        if (values := tracker.get("values")) is not None:
            values.copy_(before + (values - before) * share)
