"""What layers get while a slice runs."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from megatron_pp_ext.features.units.megatron.layers import Call, Calls, cut, require_hidden
from megatron_pp_ext.features.units.runtime import Sequence, Slice, at_work_on
from megatron_pp_ext.runtime.split import Owner

LENGTH = 8
ENDS = torch.tensor([0, 4, 5, 8], dtype=torch.int32)


class CoreAttention(torch.nn.Module):
    """Returns what it is called with."""

    def forward(
        self, query: Any, key: Any, value: Any, attention_mask: Any, attn_mask_type: Any = None
    ) -> tuple[Any, Any, Any]:
        return key, attention_mask, attn_mask_type


class Model(torch.nn.Module):
    """A model with attention and two kinds of rotary positions."""

    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.core_attention = attention
        self.rotary = RotaryEmbedding(4, 1.0, use_cpu_initialization=True)
        self.yarn = YarnRotaryEmbedding(4, use_cpu_initialization=True)


def slice_of(start: int, end: int) -> Slice:
    return Slice(Sequence(Owner(0, 0), LENGTH), start, end, ((start, end),), LENGTH)


def attend(model: Model, one: Slice, mask: Any = None) -> tuple[Any, Any, Any]:
    new = torch.ones(one.end - one.start, 1, 1, 1)
    with at_work_on(one):
        found: tuple[Any, Any, Any] = model.core_attention(new, new, new, mask, AttnMaskType.causal)
    return found


def test_local_attention_gets_a_mask_that_ends_at_the_bottom_right() -> None:
    model = Model(CoreAttention())
    Calls(model)
    key, mask, _ = attend(model, slice_of(2, 4))
    assert len(key) == 4
    assert mask.int().tolist() == [[[[0, 0, 0, 1], [0, 0, 0, 0]]]]
    given = torch.ones(1, 1, 2, 4, dtype=torch.bool)
    assert attend(model, slice_of(2, 4), given)[1] is given
    assert attend(model, slice_of(0, 2))[1] is None


def test_the_engine_s_attention_gets_its_own_name_of_that_mask() -> None:
    kind = type("Attention", (CoreAttention,), {"__module__": "megatron.core.extensions.transformer_engine"})
    model = Model(kind())
    Calls(model)
    for mask in (None, torch.ones(1, 1, 2, 4, dtype=torch.bool)):
        assert attend(model, slice_of(2, 4), mask)[2] == AttnMaskType.causal_bottom_right
    assert attend(model, slice_of(0, 2))[2] == AttnMaskType.causal


@pytest.mark.parametrize("kind", [kind for kind in AttnMaskType if kind is not AttnMaskType.causal])
@pytest.mark.parametrize("module", [__name__, "megatron.core.extensions.transformer_engine"])
def test_attention_of_another_kind_is_refused(kind: AttnMaskType, module: str) -> None:
    """Before a step by what the layer has, and in it by what the layer is called with."""
    attention = type("Attention", (CoreAttention,), {"__module__": module})
    model, new = Model(attention()), torch.ones(2, 1, 1, 1)
    assert Calls(model).refused == ""
    with at_work_on(slice_of(2, 4)), pytest.raises(ValueError, match=f"is of kind {kind.name}"):
        model.core_attention(new, new, new, None, kind)
    for part in (model, model.core_attention):
        part.attn_mask_type = kind if part is model else kind.name
        assert f"is of kind {kind.name}, in which tokens may see later ones" in Calls(model).refused
        part.attn_mask_type = AttnMaskType.causal if part is model else "causal"
    assert Calls(model).refused == ""


def test_hooks_belong_to_a_layer_once() -> None:
    """Other runners of a model, and models that share layers or are copies, add none."""
    model = Model(CoreAttention())
    whole = model.yarn.get_cached_cos_sin(LENGTH)
    Calls(model), Calls(torch.nn.Sequential(model.core_attention, model.yarn, model.rotary)), Calls(model)
    for one in (model, copy.deepcopy(model)):
        Calls(one)
        first, second = (attend(one, slice_of(*ends))[0] for ends in ((0, 2), (2, 4)))
        assert (len(first), len(second)) == (2, 4)
        with at_work_on(slice_of(2, 4)):
            assert torch.equal(one.yarn.get_cached_cos_sin(2)[0], whole[0][2:4])
            assert torch.equal(one.rotary(2), one.rotary.forward(2, offset=2))


def test_rotary_positions_begin_at_the_slice() -> None:
    model = Model(CoreAttention())
    whole = [model.rotary(LENGTH), model.yarn(LENGTH)[0], *model.yarn.get_cached_cos_sin(LENGTH)]
    Calls(model)
    with at_work_on(slice_of(2, 6)):
        found = [model.rotary(4), model.yarn(4)[0], *model.yarn.get_cached_cos_sin(4)]
    for one, other in zip(found, whole, strict=True):
        assert torch.equal(one, other[2:6])
    assert torch.equal(model.rotary(LENGTH), whole[0])


def test_a_batch_is_cut_along_its_tokens() -> None:
    tokens = torch.arange(2 * LENGTH).reshape(2, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    given = {"input_ids": tokens, "position_ids": tokens[None], "attention_mask": mask, "labels": None}
    found = cut(given, slice_of(2, 4))
    assert found["input_ids"].tolist() == [[2, 3], [10, 11]]
    assert found["position_ids"].shape == (1, 2, 2)
    assert torch.equal(found["attention_mask"], mask[:, :, 2:4, :4])
    assert found["labels"] is None


@pytest.mark.parametrize(
    "hide",
    [
        lambda one: one,
        lambda one: [one],
        lambda one: ("text", {"of an image": one}),
        lambda one: {"deep": [{"stack": (one,)}]},
        lambda one: SimpleNamespace(features=one),
        lambda one: PackedSeqParams(cu_seqlens_q=one),
        lambda one: [one.numpy()],
    ],
)
def test_tensors_are_not_handed_on_uncut(hide: Any) -> None:
    with pytest.raises(ValueError, match="do not know how to cut pixels"):
        cut({"pixels": hide(torch.ones(1))}, slice_of(0, 1))


def test_a_mask_begins_where_the_document_of_a_slice_does() -> None:
    """The slice has token 2 to 4 of a document that is token 4 to 8 of its microbatch."""
    mask = torch.arange(LENGTH * LENGTH).reshape(1, 1, LENGTH, LENGTH)
    one = Slice(Sequence(Owner(0, 0), 4), 2, 4, ((6, 8),), LENGTH)
    found = cut({"attention_mask": mask}, one)["attention_mask"]
    assert found.tolist() == [[[[52, 53, 54, 55], [60, 61, 62, 63]]]]


def test_what_has_no_tensors_is_handed_on() -> None:
    given = {"a": [1, "b"], "c": {"d": np.float32(0.7)}, "e": AttnMaskType.causal, "f": slice_of}
    assert cut(given, slice_of(0, 1)) == given


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="do not know how to cut packed_seq_params"):
        cut({"packed_seq_params": object()}, slice_of(0, 1))
    with pytest.raises(ValueError, match="planned for 8 tokens of a microbatch, and its labels has 9"):
        cut({"labels": torch.ones(1, 9)}, slice_of(0, 1))
    with pytest.raises(ValueError, match="its attention_mask has 1; let lengths count"):
        cut({"attention_mask": torch.ones(1, 1, 1, LENGTH)}, slice_of(0, 1))


def test_a_mask_has_to_hide_what_a_slice_has_no_keys_of() -> None:
    """Later tokens, and those before the slice's own document, of which it is token 4 to 8 here."""
    of_document = Slice(Sequence(Owner(0, 0), 4), 2, 4, ((6, 8),), LENGTH)
    for one, hidden in ((slice_of(2, 4), (4, 7)), (of_document, (0, 3))):
        mask = torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.bool)
        (begin, end), (first, last) = one.ranges[0], hidden
        mask[..., begin:end, first : last + 1] = True
        require_hidden({"attention_mask": mask}, one)
        for key in hidden:
            seen = mask.clone()
            seen[..., end - 1, key] = False
            with pytest.raises(ValueError, match=f"lets tokens {begin} to {end} of a microbatch see"):
                require_hidden({"attention_mask": seen}, one)


def test_a_forward_step_may_not_write_to_what_its_model_is_called_with() -> None:
    call, labels = Call(Calls(Model(CoreAttention()))), torch.ones(1, LENGTH)
    call.note({"labels": labels, "other": "text"})
    assert call.again()["labels"] is labels
    labels.masked_fill_(labels > 0, -100)
    with pytest.raises(ValueError, match="the forward step writes to labels after its model"):
        call.again()


PACK = PackedSeqParams("thd", ENDS, ENDS, max_seqlen_q=4, max_seqlen_kv=4)


def test_a_pack_gets_its_own_documents() -> None:
    """Of documents of 4, 1 and 3 tokens the pack has the first and the last, which are not neighbours."""
    one = Slice(None, 0, 7, ((0, 4), (5, 8)), LENGTH, (4, 3))
    found = cut({"input_ids": torch.arange(LENGTH)[None], "packed_seq_params": PACK}, one)
    assert found["input_ids"].tolist() == [[0, 1, 2, 3, 5, 6, 7]]
    params = found["packed_seq_params"]
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 4, 7]
    assert (params.max_seqlen_q, params.max_seqlen_kv) == (4, 4)


def test_a_slice_of_one_document_is_no_pack() -> None:
    """Its attention begins with the first key: no description of documents is needed."""
    one = Slice(Sequence(Owner(0, 0), 4), 2, 4, ((2, 4),), LENGTH, (2,))
    assert cut({"packed_seq_params": PACK}, one)["packed_seq_params"] is None


def test_documents_that_the_model_is_not_told_of_are_refused() -> None:
    long = Slice(Sequence(Owner(0, 0), 6), 0, 3, ((0, 3),), LENGTH, (3,))
    for one in (Slice(None, 0, 7, ((0, 4), (5, 8)), LENGTH, (4, 3)), long):
        with pytest.raises(ValueError, match="gives the model no packed_seq_params"):
            cut({"packed_seq_params": None}, one)
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    assert cut({"attention_mask": mask}, long)["attention_mask"].shape == (1, 1, 3, 3)


def test_documents_that_the_step_was_not_planned_for_are_refused() -> None:
    """Data that does not state them counts as one document, whose lengths may be padded by the last end."""
    whole = Slice(None, 0, 3, ((0, 3),), LENGTH, (3,))
    with pytest.raises(ValueError, match="several documents, and the step was planned for one"):
        cut({"packed_seq_params": PACK}, replace(whole, sequence=Sequence(Owner(0, 0), LENGTH)))
    one = replace(PACK, cu_seqlens_q=torch.tensor([0, LENGTH, LENGTH]))
    assert cut({"packed_seq_params": one}, replace(whole, total=3))["packed_seq_params"] is None


def test_a_slice_keeps_no_mask_of_its_whole_sequence() -> None:
    whole = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    mask = cut({"attention_mask": whole}, slice_of(2, 4))["attention_mask"]
    assert torch.equal(mask, whole[:, :, 2:4, :4])
    assert mask.untyped_storage().nbytes() == mask.nbytes
