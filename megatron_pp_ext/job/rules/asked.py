"""What was asked, as the rules look at it."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from megatron_pp_ext.job import layers
from megatron_pp_ext.job.typed_job import Job
from megatron_pp_ext.schedule import catalog, costs_file
from megatron_pp_ext.schedule.abilities import Abilities
from megatron_pp_ext.schedule.actions import Schedule
from megatron_pp_ext.schedule.names import AUTO
from megatron_pp_ext.schedule.placement import Placement

ENGINE = "transformer-engine"
"""The name of the package whose layers run on GPUs."""

FIRST_ENGINE = "2.3"
"""The first Transformer Engine whose modules have a store (``WeightGradStore``, module/_common.py)."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Every flag under the name of its argument, the ``job`` that the flags describe, and what follows.

    A flag that this release of Megatron lacks is None, and so is what is not known yet, as long as the
    schedule has not been read: rules about it do not hold then.
    """

    args: Namespace
    releases: Mapping[str, str] = field(default_factory=dict)
    """The versions of packages, by name, where the machine that trains is known; "0.0.0" means none."""
    placement: Placement | None = None
    chunks: int | None = None
    """The chunks a rank, at most; known where the placement is not settled yet."""
    splits: bool | None = None
    """Whether the backward is split into input and weight gradients."""
    from_file: Schedule | None = None
    """The schedule of ``csv:FILE``."""
    job: Job = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "job", Job.of(self.args))

    def changed(self, **values: Any) -> Self:
        """Return what was asked, but with other ``values`` of arguments."""
        return replace(self, args=Namespace(**{**vars(self.args), **values}))

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # a property failed: its own error is told
        return getattr(self.args, name, None)

    def __getitem__(self, name: str) -> Any:
        """Return what ``name`` stands for in the text of a rule."""
        return getattr(self, name)

    def is_set(self, flag: str) -> bool:
        """Whether ``flag``, spelled with dashes, has a value other than none, off and 0."""
        return bool(getattr(self.args, flag.removeprefix("--").replace("-", "_"), None))

    @property
    def schedule(self) -> str:
        """What schedules the job, in words."""
        name = self.pipeline_schedule
        return "Megatron's own schedules" if name is None else f"--pipeline-schedule {name}"

    @property
    def can(self) -> Abilities:
        """What the schedule can do."""
        return catalog.abilities(self.pipeline_schedule)

    @property
    def has_schedule(self) -> bool:
        """Whether one of this package's schedules is to run."""
        return self.pipeline_schedule is not None

    @property
    def paired_schedules(self) -> str:
        """The names of the schedules that can run forwards and backwards in pairs."""
        *names, last = (one for one, entry in catalog.ENTRIES.items() if entry.make_paired)
        return f"{', '.join(names)} or {last}"

    @property
    def has_layout(self) -> bool:
        """Whether a layout describes the stages, other than the one that is yet to be found."""
        return self.pipeline_model_parallel_layout not in (None, AUTO)

    @property
    def finds_layout(self) -> bool:
        """Whether a layout is yet to be found."""
        return bool(self.pipeline_model_parallel_layout == AUTO)

    @property
    def spreading_flags(self) -> str:
        """The flags that spread layers over stages otherwise than a layout, in words; empty without one."""
        return " and ".join(flag for flag in layers.SPREAD if self.is_set(flag))

    @property
    def layout_of_v(self) -> str:
        """The layout that says of a V what other flags say of the ends of a model."""
        return layers.as_v(self.job)

    @property
    def pattern(self) -> str | None:
        """The layers of a hybrid model."""
        return self.job.model.pattern

    @property
    def predicting_stage(self) -> int | None:
        """The stage with multi-token prediction."""
        return layers.predicting_stage(self.job, self.placement.stages) if self.placement else None

    @property
    def stages_for_prediction(self) -> str:
        """The stages that may have it, in words."""
        assert self.placement is not None
        return " or ".join(map(str, layers.stages_for_prediction(self.placement)))

    @property
    def can_predict(self) -> bool:
        """Whether multi-token prediction is where Megatron can train it, as far as the placement is known."""
        return self.placement is None or layers.can_predict(self.job, self.placement)

    @property
    def predicts_before_the_end(self) -> bool:
        """Whether a layout puts multi-token prediction into another stage than the last."""
        return self.has_layout and any("m" in stage for stage in (layers.layout(self.job) or ())[:-1])

    @property
    def is_v(self) -> bool:
        """Whether both ends of the model are on one rank."""
        return self.placement is not None and self.placement.is_mirrored(1)

    @property
    def changes_its_order(self) -> bool:
        """Whether another order takes the place of the first one while the job runs."""
        return self.can.measures_memory or self.pipeline_profile_steps is not None

    @property
    def has_room_for_another(self) -> bool:
        """Whether a schedule compiled from measurements may take the place of the one that is asked."""
        return self.has_schedule and self.can.flushes and not self.can.file

    @property
    def lacks_parameters(self) -> bool:
        """Whether the file of --pipeline-costs is without the parameters of some stage."""
        file = self.pipeline_costs
        return file is not None and not costs_file.read(file).has_parameters

    @property
    def has_distributed_optimizer(self) -> bool:
        """Whether --optimizer shares out whole layers to data-parallel ranks."""
        return str(self.optimizer).startswith("dist_")

    @property
    def has_indexer(self) -> bool:
        """Whether all sizes of sparse attention's indexer are given."""
        return bool(self.dsa_indexer_n_heads and self.dsa_indexer_head_dim and self.dsa_indexer_topk)

    @property
    def has_heterogeneous_layers(self) -> bool:
        """Whether a file describes each layer of the model by itself."""
        flags = "--heterogeneous-layers-config-path", "--heterogeneous-layers-config-encoded-json"
        return any(map(self.is_set, flags))

    @property
    def has_dense_layer(self) -> bool:
        """Whether the model has a layer whose MLP is not one of experts."""
        model = self.job.model
        return "-" in model.pattern if model.pattern else not (model.num_experts and all(model.has_experts))

    @property
    def gathers_weights(self) -> bool:
        """Whether weights are cut into more parts than tensor-parallel ranks, and gathered for each use."""
        return (self.tensor_parallel_num_weight_shards or 0) > self.job.parallel.tensor_model_parallel_size

    @property
    def gathers_experts(self) -> bool:
        """The same of the weights of experts."""
        return (self.expert_tensor_parallel_num_weight_shards or 0) > self.job.parallel.expert_tensor

    @property
    def engine(self) -> str:
        """The version of Transformer Engine on the machine that trains."""
        return self.releases.get(ENGINE, "")

    @property
    def has_own_layers(self) -> bool:
        """Whether --spec names layers that are not Megatron's."""
        return self.spec is not None and not self.spec[0].startswith("megatron.core.")
