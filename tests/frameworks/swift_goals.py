"""What ms-swift's trainers can learn: a trainer of the next token becomes one of something else."""

from typing import Any

import torch
from megatron.core import parallel_state
from swift.loss import loss_map
from swift.megatron.trainers.dpo_trainer import DummyDPOTrainer, MegatronDPOTrainer
from swift.megatron.trainers.embedding_trainer import MegatronEmbeddingTrainer
from swift.megatron.trainers.reranker_trainer import MegatronRerankerTrainer
from swift.megatron.trainers.trainer import MegatronTrainer
from swift.metrics import eval_metrics_map

EMBEDDINGS, RANKING, CHANNELS, PREFERENCES = "embeddings", "ranking", "channels", "preferences"


def learn_embeddings(trainer: MegatronTrainer, models: list[torch.nn.Module]) -> None:
    """Make ``trainer`` one of embeddings: it measures where the loss is, and reads that on the last rank."""

    class Trainer(MegatronEmbeddingTrainer, type(trainer)):  # type: ignore[misc]
        def get_last_tokens(self, output: torch.Tensor, *args: Any) -> torch.Tensor:
            return output.float().mean(tuple(range(output.dim() - 1)))[None]

    class Measure(eval_metrics_map["infonce"]):  # type: ignore[misc]
        def update(self, hidden: torch.Tensor, labels: torch.Tensor) -> None:
            super().update(hidden, labels[:, :1])

        def _calculate_metrics(self, hidden: Any, labels: Any) -> dict[str, float]:
            return {"mean": float(hidden.mean())}

    trainer.__class__ = Trainer
    trainer.unwrapped_models, trainer.args.mrl_dims, trainer.args.task_type = models, None, "embedding"
    trainer.config.calculate_per_token_loss = False
    trainer._loss_func = lambda output, labels: output["last_hidden_state"].pow(2).mean()
    trainer.eval_metrics = Measure(trainer.args, trainer)
    trainer.eval_metrics.group = parallel_state.get_data_parallel_group()


def learn_ranking(trainer: MegatronTrainer, models: list[torch.nn.Module]) -> None:
    """Make ``trainer`` one of rerankers, whose samples are a document that fits a query and some that do not.

    The score of a document is the logit of token 0, where ms-swift would look for "yes" by a tokenizer.
    """

    class Trainer(MegatronRerankerTrainer, type(trainer)):  # type: ignore[misc]
        def get_last_tokens(self, output: torch.Tensor, *args: Any) -> torch.Tensor:
            return output[:, -1, :1]

    trainer.__class__ = Trainer
    trainer.unwrapped_models, trainer.args.task_type = models, "generative_reranker"
    trainer.args.loss_type = "pointwise_reranker"
    trainer.config.calculate_per_token_loss = False
    trainer._loss_func = loss_map[trainer.args.loss_type](trainer.args, trainer)
    group = parallel_state.get_data_parallel_group()
    trainer.eval_metrics = eval_metrics_map["reranker"](trainer.args, trainer, group=group)


def learn_by_channel(trainer: MegatronTrainer, models: list[torch.nn.Module]) -> None:
    """Make ``trainer`` report the loss of each channel, a name that a sample has, too."""
    trainer.args.enable_channel_loss = True


def learn_preferences(trainer: MegatronTrainer, references: list[torch.nn.Module]) -> None:
    """Make ``trainer`` one of preferences (DPO); ``references`` are the chunks of the model that stays.

    Each step of a stage runs that model too, and both go to the next stage in one message.
    """

    class Trainer(MegatronDPOTrainer, type(trainer)):  # type: ignore[misc]
        pass

    trainer.__class__ = Trainer
    vars(trainer.args).update(
        tuner_type="full",
        mcore_ref_adapter=None,
        ref_adapters=None,
        rpo_alpha=None,
        reference_free=False,
        label_smoothing=0.0,
        f_divergence_type="reverse_kl",
        loss_type="sigmoid",
        beta=0.1,
    )
    trainer.dummy_dpo_trainer = DummyDPOTrainer(trainer.args)
    trainer.ref_models = references
    for reference in references:
        reference.requires_grad_(False)
        reference.eval()
    trainer.config.calculate_per_token_loss = False


LEARN = {EMBEDDINGS: learn_embeddings, RANKING: learn_ranking, CHANNELS: learn_by_channel}
