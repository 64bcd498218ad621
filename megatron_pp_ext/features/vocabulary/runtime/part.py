"""A rank's part of a vocabulary that all ranks of a pipeline share."""

from dataclasses import dataclass

from megatron_pp_ext.features.vocabulary.runtime.embedding import SharedEmbedding
from megatron_pp_ext.features.vocabulary.runtime.output import SharedOutput
from megatron_pp_ext.schedule.messages import Exchange, Exchanged

_OF_EMBEDDING = {Exchanged.TOKENS, Exchanged.EMBEDDED, Exchanged.INPUT}


@dataclass
class SharedVocabulary:
    """Its parts of the embedding and of the output layer.

    All ranks launch their exchanges in one order, in groups that carry nothing else.
    """

    embedding: SharedEmbedding
    output: SharedOutput

    def launch(self, exchange: Exchange) -> None:
        """Begin an exchange with the other ranks; later computation does not wait for it."""
        part = self.embedding if exchange.what in _OF_EMBEDDING else self.output
        part.launch(exchange)
