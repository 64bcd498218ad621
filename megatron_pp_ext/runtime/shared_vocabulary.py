"""A rank's part of a vocabulary that all ranks of a pipeline share: of the embedding and of the output layer.

It stands before the first stage and behind the last one, as ``executor.Vocabulary`` says.
"""

from dataclasses import dataclass

import torch

from megatron_pp_ext.runtime.shared_embedding import SharedEmbedding
from megatron_pp_ext.runtime.shared_output import SharedOutput
from megatron_pp_ext.schedule.messages import Exchange, Exchanged

_OF_EMBEDDING = {Exchanged.TOKENS, Exchanged.EMBEDDED, Exchanged.INPUT}


@dataclass
class SharedVocabulary:
    """Both parts; all ranks launch their exchanges in one order, in groups that carry nothing else."""

    embedding: SharedEmbedding
    output: SharedOutput

    def launch(self, exchange: Exchange) -> None:
        """See ``executor.Vocabulary``."""
        part = self.embedding if exchange.what in _OF_EMBEDDING else self.output
        part.launch(exchange)

    def embedded(self, microbatch: int) -> torch.Tensor:
        """See ``executor.Vocabulary``."""
        return self.embedding.embedded(microbatch)

    def take_input_gradient(self, microbatch: int, gradient: torch.Tensor | None) -> None:
        """See ``executor.Vocabulary``."""
        self.embedding.take(microbatch, gradient)

    def keep(self, microbatch: int, hidden: torch.Tensor) -> None:
        """See ``executor.Vocabulary``."""
        self.output.keep(microbatch, hidden)

    def scores(self, microbatch: int) -> None:
        """See ``executor.Vocabulary``."""
        self.output.scores(microbatch)

    def output_gradient(self, microbatch: int) -> torch.Tensor:
        """See ``executor.Vocabulary``."""
        return self.output.output_gradient(microbatch)

    def weight_gradient(self, microbatch: int) -> None:
        """See ``executor.Vocabulary``."""
        self.output.weight_gradient(microbatch)

    def close(self) -> None:
        """See ``executor.Vocabulary``."""
        self.embedding.close()
        self.output.close()
