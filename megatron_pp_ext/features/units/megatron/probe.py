"""The check before a model's first step that its tokens meet in no other way than slices know.

Slices know attention, through the keys and values of earlier ones, Megatron's recurrent layers, through their
states, and positions.  Any other operation along the sequence, such as a token shift, a convolution or
attention of one's own, would see a slice alone, and gradients would be wrong in silence.  So each chunk runs
a few random tokens on its rank, whose attention and recurrent layers return zeros: a token whose input is no
number has to be the only one whose output is none.  Each of these layers is then held in slices against
itself on the whole, and the positions of a slice against those of the whole.

Weights do not matter: also zero times no number is none.  The model is in evaluation mode meanwhile, and its
buffers and random numbers are put back, so that no step knows of it.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.moe.router import Router
from megatron.core.utils import unwrap_model

from megatron_pp_ext.features.units import runtime as prefixes
from megatron_pp_ext.features.units.megatron.agreement import seen_by_any
from megatron_pp_ext.features.units.megatron.context_parallel import why_not_shared, without_group
from megatron_pp_ext.features.units.megatron.layers import Calls, calls_in_forward, cut, named, with_prefix
from megatron_pp_ext.features.units.megatron.states import is_recurrent
from megatron_pp_ext.features.units.options import SLICE_FLAG
from megatron_pp_ext.features.units.runtime import Slice, at_work_on
from megatron_pp_ext.megatron.core.placed_models import as_chunk
from megatron_pp_ext.megatron.runners.model_stage import StepInputs
from megatron_pp_ext.megatron.runners.transport import device
from megatron_pp_ext.runtime.rank import print_rank_0
from megatron_pp_ext.runtime.split import STORE, Owner
from megatron_pp_ext.setting_error import SettingError

MOST = 64
"""The most tokens of each of the two slices of the check."""

_passed: WeakSet[torch.nn.Module] = WeakSet()
"""The models that were checked."""


class _NotKnown(Exception):
    """Why a model cannot be checked."""


class _Defect(Exception):
    """A result that slices would get wrong."""


def require_known_operations(
    calls: Sequence[Calls], inputs: StepInputs, slice_tokens: int, is_requested: bool
) -> None:
    """Raise ValueError, the same on all ranks that meet in a step, for a model whose slices would be wrong.

    Collective over their groups the first time for a model.  Where the check is not requested, only the kinds
    of attention are looked at; where a model cannot be checked, the first rank prints why.
    """
    models: list[torch.nn.Module] = unwrap_model(list(inputs.model))
    if all(model in _passed for model in models):
        return
    refused, unknown = {call.refused for call in calls} - {""}, set[str]()
    if inputs.groups.cp.size() > 1:
        refused |= {
            f"context-parallel ranks cannot share slices of this model: {why}; leave out {SLICE_FLAG}"
            for why in filter(None, map(why_not_shared, models))
        }
    tensor = int(inputs.groups.tp.size()) if inputs.config.sequence_parallel else 1
    positions = min(int(getattr(model, "max_sequence_length", 2 * MOST)) for model in models)
    tokens = max(1, min(MOST, slice_tokens, positions // 2) // tensor) * tensor
    for chunk, model in enumerate(models if is_requested and not refused else ()):
        try:
            with as_chunk(chunk if len(models) > 1 else None), _aside(model):
                rank = inputs.groups.tp.rank() % tensor
                _Probe(model, inputs.config, tokens, rank, tensor, inputs.groups.cp.size() > 1).run()
        except _Defect as error:
            refused.add(
                f"slices of sequences cannot train this model: {error}; leave out {SLICE_FLAG}, or add "
                "--pipeline-slice-check off if that does not matter"
            )
        except _NotKnown as error:
            unknown.add(str(error))
    if seen := seen_by_any(refused, inputs):
        raise SettingError(min(seen))
    if seen := seen_by_any(unknown, inputs):
        print_rank_0(f"megatron_pp_ext: whether this model can have slices could not be checked: {min(seen)}")
    _passed.update(models)


class _Probe:
    """Runs one ``model`` on two slices of so many ``tokens``.

    Under sequence parallelism hidden states have a part of the tokens, that of ``rank`` of so many ``ranks``.
    ``is_shared`` is whether context-parallel ranks share slices: here each has all tokens.
    """

    def __init__(
        self, model: Any, config: Any, tokens: int, rank: int, ranks: int, is_shared: bool = False
    ) -> None:
        self.model, self.config = model, config
        self.tokens, self.whole = tokens, range(2 * tokens)
        self.rank, self.ranks, self.is_shared = rank, ranks, is_shared
        self.poisoned = len(self.whole) // 4
        self.device = device()
        self.is_first = bool(getattr(model, "pre_process", True))
        self.attentions = {
            id(module.core_attention): module.core_attention
            for module in model.modules()
            if isinstance(getattr(module, "core_attention", None), torch.nn.Module)
        }
        self.recurrences = {id(module): module for module in model.modules() if is_recurrent(module)}
        self.predicts = bool(getattr(model, "mtp_process", False))
        """Whether the model has layers of multi-token prediction."""

    def run(self) -> None:
        """Raise ``_Defect`` for what slices would get wrong, ``_NotKnown`` where that cannot be seen."""
        self._require_forward()
        try:
            if self.is_first:
                self._check_embedding()
            of_whole, output = self._forward(self.whole, poisons=True)
            of_slice, finite = self._forward(self.whole[self.tokens :], poisons=False)
            self._check_output(output, finite)
            for key, calls in of_whole.items():
                if len(calls) > calls_in_forward(self.attentions.get(key)):
                    raise _Defect(f"a forward calls a layer {len(calls)} times")
                for call, other in zip(calls, of_slice[key], strict=True):
                    if key in self.recurrences:
                        self._check_recurrence(self.recurrences[key], call)
                        continue
                    self._check_attention(self.attentions[key], call)
                    self._check_positions(call, other)
        except (_Defect, _NotKnown):
            raise
        except Exception as error:
            first, *_ = *str(error).splitlines(), ""
            raise _NotKnown(f"a call with random tokens ends in {type(error).__name__}: {first}") from error

    def _require_forward(self) -> None:
        if getattr(self.config, "fp8", None) or getattr(self.config, "fp4", None):
            raise _NotKnown("the scale of a tensor in FP8 or FP4 makes each of its tokens depend on all")
        for name in ("set_input_tensor", "embedding")[: 1 + self.is_first]:
            if not hasattr(self.model, name):
                raise _NotKnown(f"{type(self.model).__name__} has no {name}")
        try:
            inspect.signature(self.model.forward).bind(**self._arguments(self.whole))
        except TypeError as error:
            raise _NotKnown(f"the model has other arguments than a GPT: {error}") from None

    def _arguments(self, tokens: range) -> dict[str, Any]:
        """Return the model's arguments for these ``tokens``, whose words go round its vocabulary."""
        places = torch.arange(tokens.start, tokens.stop, device=self.device)[None]
        return {
            "input_ids": places % int(getattr(self.model, "vocab_size", 2)),
            "position_ids": places,
            "attention_mask": None,
        }

    def _mine(self, tokens: range) -> range:
        """Return the ``tokens`` whose hidden states this rank has."""
        count = len(tokens) // self.ranks
        return tokens[self.rank * count : (self.rank + 1) * count]

    def _poison(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the ``hidden`` states of this rank, of which one token's are no numbers."""
        hidden, mine = hidden.clone(), self._mine(self.whole)
        if self.poisoned in mine:
            hidden[mine.index(self.poisoned)] = torch.nan
        return hidden

    def _check_embedding(self) -> None:
        arguments = {name: value for name, value in self._arguments(self.whole).items() if value is not None}
        before = self.model.embedding(**arguments)
        arguments["input_ids"][0, self.poisoned] += 1
        arguments["input_ids"] %= int(getattr(self.model, "vocab_size", 2))
        changes = (before != self.model.embedding(**arguments)).flatten(1).any(1)
        if any(changes[at] for at, token in enumerate(self._mine(self.whole)) if token != self.poisoned):
            raise _Defect("the embedding of a token depends on other tokens, which may be in another slice")

    def _forward(self, tokens: range, poisons: bool) -> tuple[dict[int, list[dict[str, Any]]], torch.Tensor]:
        """Return the arguments of each call of a layer in which tokens meet, and the output of a forward."""
        layers = self.attentions | self.recurrences
        calls: dict[int, list[dict[str, Any]]] = {key: [] for key in layers}
        change = self._poison if poisons else torch.clone
        with ExitStack() as stack:

            def add(handle: Any) -> None:
                stack.callback(handle.remove)

            for key, layer in layers.items():
                stack.enter_context(without_group(layer))
                add(layer.register_forward_pre_hook(partial(_note, calls[key]), with_kwargs=True))
                add(layer.register_forward_hook(lambda module, args, output: _zeros(output)))
            for router in (module for module in self.model.modules() if isinstance(module, Router)):
                add(router.register_forward_pre_hook(_numbers_alone))  # its kernels may not expect others
            hidden = None
            if self.is_first:
                add(self.model.embedding.register_forward_hook(lambda module, args, output: change(output)))
            else:
                shape = len(self.whole), 1, self.config.hidden_size
                dtype = self.config.pipeline_dtype or self.config.params_dtype
                drawn = _drawn(shape, 0).to(self.device, dtype)
                mine = self._mine(tokens)
                hidden = change(drawn[mine.start : mine.stop])
                if getattr(self.model, "post_process", True) and not self.predicts:
                    # A stage before has predicted, where any does.
                    hidden = torch.cat([hidden] * (1 + (self.config.mtp_num_layers or 0)))
            if self.predicts:
                add(self.model.mtp.register_forward_hook(self._check_predictions))
            stack.callback(self.model.set_input_tensor, [None])
            self.model.set_input_tensor([hidden])
            arguments = self._arguments(tokens)
            if tokens.start or self.is_shared:  # context-parallel ranks would divide positions of the whole
                part = _slice(None, tokens)
                stack.enter_context(at_work_on(part))
                arguments = cut(self._arguments(self.whole), part)
            output: torch.Tensor = self.model(**arguments)
        return calls, output

    def _check_output(self, output: torch.Tensor, finite: torch.Tensor) -> None:
        """Only the poisoned token has an output that is no number."""
        mine, rows = self._mine(self.whole), output
        if getattr(self.model, "post_process", True) and len(rows) == 1:  # batch x all tokens x words
            mine, rows = self.whole, rows[0]
        elif self.predicts:
            rows = rows[: len(mine)]
        if len(rows) != len(mine) or finite.isnan().any():
            raise _NotKnown(f"its output has the shape {tuple(output.shape)}, or is no number for numbers")
        is_none = self._without_others(mine, rows)
        if self.poisoned in mine and not is_none[mine.index(self.poisoned)]:
            raise _NotKnown("its output does not depend on its input alone")

    def _without_others(self, mine: range, rows: torch.Tensor) -> torch.Tensor:
        """Return which ``rows`` are no number: of ``mine`` the poisoned token's at most."""
        is_none = rows.flatten(1).isnan().any(1)
        if any(is_none[at] for at, token in enumerate(mine) if token != self.poisoned):
            raise _Defect(
                "outside of its attention (core_attention) and recurrent layers the output of a token "
                "depends on other tokens, which may be in another slice"
            )
        return is_none

    def _check_predictions(self, block: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        """What layers of multi-token prediction make of a token depends on that and on the next tokens."""
        layers = 1 + self.config.mtp_num_layers
        for rows in output.chunk(layers) if len(output) == layers * len(self._mine(self.whole)) else ():
            self._without_others(self._mine(self.whole), rows)

    def _check_attention(self, attention: torch.nn.Module, call: dict[str, Any]) -> None:
        """In two slices attention gives what it gives for the whole, but for rounding.

        Each rounds its probabilities and its output, or products as TF32 does, to the same number of digits.
        """
        drawn = {
            what: _drawn(call[what].shape, seed).to(call[what])
            for seed, what in enumerate(("query", "key", "value", "x", "qr"))  # the last are an indexer's
            if call.get(what) is not None
        }
        with without_group(attention):
            whole, parts = attention.forward(**{**call, **drawn}), list[torch.Tensor]()
        sequence = prefixes.Sequence(Owner(0, 0), len(self.whole))
        for tokens in (self.whole[: self.tokens], self.whole[self.tokens :]):
            cut = {what: value[tokens.start : tokens.stop] for what, value in drawn.items()}
            with at_work_on(_slice(sequence, tokens)), without_group(attention):
                _, arguments = with_prefix(attention, (), {**call, **cut})
                parts.append(attention.forward(**arguments))
        if error := _error(whole, torch.cat(parts)):
            raise _Defect(
                f"{type(attention).__name__} gives other results in slices than for a whole sequence (by "
                f"{error:.0%}): its tokens may see later ones, or meet outside of queries, keys and values"
            )

    def _check_recurrence(self, layer: torch.nn.Module, call: dict[str, Any]) -> None:
        """In two slices a recurrent layer gives what it gives for the whole, but for rounding."""
        hidden = call["hidden_states"]
        drawn = _drawn((len(self.whole), *hidden.shape[1:]), 0).to(hidden)
        sequence = prefixes.Sequence(Owner(0, 0), len(self.whole))

        def output(tokens: range) -> torch.Tensor:
            mine = self._mine(tokens)
            result, _ = layer.forward(**{**call, "hidden_states": drawn[mine.start : mine.stop]})
            if self.ranks > 1:
                result = gather_from_sequence_parallel_region(result)
            return result

        whole, parts = output(self.whole), list[torch.Tensor]()
        for tokens in (self.whole[: self.tokens], self.whole[self.tokens :]):
            with at_work_on(_slice(sequence, tokens)):
                parts.append(output(tokens))
        if error := _error(whole, torch.cat(parts)):
            raise _Defect(
                f"{type(layer).__name__} gives other results in slices than for a whole sequence (by "
                f"{error:.0%}): its tokens may meet outside of the convolution and the recurrence"
            )

    def _check_positions(self, call: dict[str, Any], of_slice: dict[str, Any]) -> None:
        """Queries and keys of a slice are those of the whole, for most tokens: others may change experts."""
        for what in ("query", "key"):
            expected = call[what][self.tokens :].float().flatten(1)
            apart = (of_slice[what].float().flatten(1) - expected).norm(dim=1) / expected.norm(dim=1)
            if apart.median() > 0.1:
                raise _Defect(
                    f"the {what} of a token is another in a slice than in the whole sequence: positions that "
                    "Megatron's rotary embeddings do not make begin anew in each slice"
                )


def _zeros(output: Any) -> Any:
    """Return zeros in the place of the result of a layer, which may come with a bias."""
    return torch.zeros_like(output) if torch.is_tensor(output) else (torch.zeros_like(output[0]), *output[1:])


def _error(whole: torch.Tensor, parts: torch.Tensor) -> float:
    """Return by how much of the ``whole`` result that of the ``parts`` is off; 0 within rounding."""
    apart, most = (numbers.float().abs().max() for numbers in (parts - whole, whole))
    return 0.0 if apart <= 8 * max(torch.finfo(whole.dtype).eps, 2**-10) * most else float(apart / most)


def _drawn(shape: Sequence[int], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _slice(sequence: prefixes.Sequence | None, tokens: range) -> Slice:
    return Slice(sequence, tokens.start, tokens.stop, ((tokens.start, tokens.stop),), tokens.stop)


def _note(calls: list[dict[str, Any]], module: torch.nn.Module, args: Any, kwargs: Any) -> None:
    calls.append(named(module, args, kwargs))


def _numbers_alone(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return args[0].nan_to_num(), *args[1:]


@contextmanager
def _aside(model: torch.nn.Module) -> Iterator[None]:
    """Leave no trace of forwards of ``model``, which compute no gradients and drop nothing meanwhile."""
    modules = list(model.modules())
    modes = [module.training for module in modules]
    buffers = [dict(module._buffers) for module in modules]
    copies = [{name: copy.clone() for name, copy in some.items() if copy is not None} for some in buffers]
    tracker, meter = get_cuda_rng_tracker(), STORE.meter
    states, host, device = tracker.get_states(), torch.get_rng_state(), torch.cuda.get_rng_state()
    STORE.meter = None
    for module in modules:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode, some, copied in zip(modules, modes, buffers, copies, strict=True):
            module.training = mode
            module._buffers.update(some)
            for name, copy in copied.items():
                module.get_buffer(name).copy_(copy)
        STORE.meter = meter
        tracker.set_states(states)
        torch.set_rng_state(host)
        torch.cuda.set_rng_state(device)
