"""One weight of which several ranks have copies or parts is trained on all of them, or on none.

With tied embeddings the embedding and the output head have a copy each, and those that predict several tokens
have more; a feature may give every rank a part.  Where some of them are frozen, stock waits for ever for
gradients.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from megatron_pp_ext.integration.core.global_names import EMBEDDING, OUTPUT, has_tied_output
from megatron_pp_ext.integration.core.parameter_marks import half_frozen


def require_alike(model: Sequence[torch.nn.Module]) -> None:
    """Raise ValueError, on all ranks, unless the job's copies and parts of each weight agree; collective."""
    local = {
        (EMBEDDING if name == OUTPUT and has_tied_output(chunk) else name, parameter.requires_grad)
        for chunk in unwrap_model(list(model))
        for name, parameter in chunk.named_parameters()
        if name in (EMBEDDING, OUTPUT)
    }
    gathered: list[set[tuple[str, bool]]] = [local] * dist.get_world_size()
    dist.all_gather_object(gathered, local)
    for name in (EMBEDDING, OUTPUT):
        frozen, trained = (
            [rank for rank, weights in enumerate(gathered) if (name, is_trained) in weights]
            for is_trained in (False, True)
        )
        if frozen and trained:
            raise ValueError(half_frozen(name, f"frozen on rank {frozen[0]}, trained on rank {trained[0]}"))
