"""The schedule of a pipeline and the cut into stages, as flags give them."""

from dataclasses import dataclass
from pathlib import Path

from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.abilities import Abilities
from megatron_pp_ext.schedule.names import AUTO


@dataclass(frozen=True)
class PipelinePart:
    """The pipeline's schedule and its stages, in the words of the flags; ``job.pipeline`` reads them."""

    pipeline_schedule: str | None = None
    pipeline_memory_limit: float | str | None = None
    pipeline_costs: Path | None = None
    pipeline_vocabulary: str | None = None
    pipeline_offload: float | str | None = None
    pipeline_offload_host_bytes: float | None = None
    pipeline_slice_tokens: int | str | None = None
    pipeline_slice_check: str | None = None
    pipeline_update_interval: int | None = None
    pipeline_replicas: str | None = None
    pipeline_loss_rank: str | None = None
    pipeline_vertical_sync: bool = False
    pipeline_allow_waits: bool = False
    num_virtual_stages_per_pipeline_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    pipeline_model_parallel_layout: str | None = None
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False

    @property
    def has_schedule(self) -> bool:
        """Whether one of this package's schedules is to run."""
        return self.pipeline_schedule is not None

    @property
    def can(self) -> Abilities:
        """The abilities of the schedule; of Megatron's own where no flag names one."""
        return catalog.abilities(self.pipeline_schedule)

    @property
    def has_layout(self) -> bool:
        """Whether a layout describes the stages, other than ``auto``, which is yet to be found."""
        return self.pipeline_model_parallel_layout not in (None, AUTO)

    @property
    def finds_layout(self) -> bool:
        """Whether a layout is yet to be found."""
        return self.pipeline_model_parallel_layout == AUTO
