"""Pre-train a GPT with Megatron-LM from the megatron-core wheel, without a checkout.

    torchrun --nproc-per-node 4 -m megatron_pp_ext.pretrain_gpt [--cpu] ARGS...

Takes Megatron-LM's own flags: the model, the data, the optimizer, checkpoints and evaluation are Megatron's.
It covers pre-training on --data-path or --mock-data; for packed sequences, fill-in-the-middle and
distillation, start the checkout's pretrain_gpt.py with ``python -m megatron_pp_ext``.
"""

if __name__ == "__main__":
    from megatron_pp_ext.__main__ import prepare
    from megatron_pp_ext.launch_errors import in_one_line

    with in_one_line():
        prepare()  # this has to come before Megatron is imported

import dataclasses
import functools
import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, utils
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_pp_ext.megatron.trainer import pretraining
from megatron_pp_ext.text_data import DEFAULT, empty_parts, working_split

Batch = dict[str, Any]
FIELDS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")

# The batches of these flags differ from those that get_batch below returns.
UNSUPPORTED = ("sft", "fim_data", "hybrid_context_parallel", "dataloader_inter_document_masking")


def dataset_config(args: Namespace) -> GPTDatasetConfig:
    """Describe the data. The fields of the config are named as Megatron's flags are, except for these."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    values = {
        **vars(args),
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "path_to_cache": args.data_cache_path,
        "tokenizer": build_tokenizer(args),
        "create_attention_mask": args.create_attention_mask_in_dataloader,
    }
    fields = {field.name for field in dataclasses.fields(GPTDatasetConfig) if field.init}
    return GPTDatasetConfig(**{name: value for name, value in values.items() if name in fields})


def require_data(args: Namespace) -> None:
    """Raise ValueError for a data file that is not there, and for one of which --split leaves a part empty.

    Megatron's GPTDataset would look for tokens in an empty part for ever.
    """
    blend, by_part = get_blend_and_blend_per_split(args)
    parts = (
        [(blend, args.split or DEFAULT)]
        if blend
        else [(part_blend, "1,0,0") for part_blend in by_part or () if part_blend]
    )
    for (prefixes, _), split in parts:
        for prefix in prefixes:
            if "://" not in prefix:  # object storage is left to Megatron
                _require_parts(prefix, split, "--data-path" if blend else "a data path")


def _require_parts(prefix: str, split: str, flag: str) -> None:
    missing = [f"{prefix}{suffix}" for suffix in (".idx", ".bin") if not os.path.exists(prefix + suffix)]
    if missing:
        raise ValueError(
            f"{flag} {prefix} has no {' and no '.join(missing)}; give the path of both files without their "
            "suffix (python -m megatron_pp_ext.text_data FOLDER PREFIX makes them from text)"
        )
    data = IndexedDataset(prefix)  # its arrays are parts of the open file, which it closes at its end
    lengths = data.sequence_lengths
    if not lengths.sum():
        raise ValueError(f"{flag} {prefix} holds no tokens; write it anew from files with text")
    empty = empty_parts(lengths, split)
    if empty:
        fix = working_split(lengths)
        alone = " and --eval-iters 0" if fix == "1,0,0" else ""
        raise ValueError(
            f"--split {split} leaves the {' and the '.join(empty)} part of {prefix} without any of its "
            f"{len(lengths)} sequence(s); add --split {fix}{alone}, or give more data"
        )


def datasets(samples: Sequence[int], vp_stage: int | None = None) -> Any:
    """Build the training, validation and test data, on the ranks whose stage reads them.

    All tensor-parallel ranks of such a stage read: the sampler goes by data-parallel rank, so they see the
    same rows, and nothing has to be broadcast.
    """
    args = get_args()
    kind = MockGPTDataset if args.mock_data else GPTDataset
    reads = functools.partial(_reads, vp_stage)
    return BlendedMegatronDatasetBuilder(kind, samples, reads, dataset_config(args)).build()


# Megatron otherwise builds data on tensor-parallel rank 0 only.
datasets.is_distributed = True  # type: ignore[attr-defined]


def _reads(vp_stage: int | None) -> bool:
    return utils.is_first_or_last_pipeline_stage(vp_stage) or pretraining.predicts_here(vp_stage)


def get_batch(data_iterator: Iterator[Batch] | None, vp_stage: int | None) -> Batch:
    """Return the next microbatch: the fields are None on a stage that needs no data.

    Stages between the first and the last need some where attention stays within documents
    (``workarounds.STAGE_DATA``), and those with multi-token prediction always do.
    """
    if not _reads(vp_stage):
        return dict.fromkeys(FIELDS)
    assert data_iterator is not None, "a stage that reads has data"
    rows = next(data_iterator)
    batch = {
        name: rows[name].cuda(non_blocking=True) if rows.get(name) is not None else None for name in FIELDS
    }
    return pretraining.part_of_context(batch)


def loss_func(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    """Sum the losses of the tokens that count; Megatron divides by the number of tokens, returned second."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=loss,
            rejection_func=lambda value: ~torch.isfinite(value),
            message="the loss of a microbatch is not finite (lower --lr, or raise --lr-warmup-iters)",
            tolerance=0.0,  # the forward pass gives the same result each time
            fatal=True,
        )
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def forward_step(
    data_iterator: Iterator[Batch] | None, model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    """Run one microbatch through this stage; return its output and the function from output to loss.

    With ``return_schedule_plan``, which Megatron asks for where a forward runs layer by layer with a
    backward, return in the output's place the plan of the work that would have run.
    """
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, functools.partial(loss_func, batch["loss_mask"])


def main() -> None:
    """Train the model that sys.argv describes."""
    pretraining.pretrain_gpt(datasets, forward_step, UNSUPPORTED, require_data)


if __name__ == "__main__":
    with in_one_line():
        main()
