"""What was asked, as the rules look at it."""

import math
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

MODULES = (
    "core_attn",
    "moe_act",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "shared_experts",
    "gdn_norm_out",
)
"""The modules that Megatron can recompute (``TransformerConfig.recompute_modules``)."""

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
        return self.placement is not None and self.placement.turns_round

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

    @property
    def gives_two_depths(self) -> bool:
        """Whether two flags give different numbers of layers."""
        return self.encoder_num_layers not in (None, self.num_layers)

    @property
    def gives_two_lengths(self) -> bool:
        """Whether two flags give different lengths of sequences."""
        return self.encoder_seq_length not in (None, self.seq_length)

    @property
    def gives_two_patterns(self) -> bool:
        """Whether two flags give different layers of a hybrid model."""
        own = (self.hybrid_layer_pattern or "").partition("/")[0]
        return (self.hybrid_override_pattern or own).partition("/")[0] != own

    @property
    def lacks_positions(self) -> bool:
        """Whether sequences are longer than there are positions."""
        positions = self.max_position_embeddings
        return positions is not None and positions < self.job.model.seq_length

    @property
    def has_other_activation(self) -> bool:
        """Whether a flag asks for another activation than SwiGLU."""
        return bool(self.squared_relu or self.quick_geglu)

    @property
    def has_uneven_no_rope(self) -> bool:
        """Whether every so many layers have no rotary positions, but no whole number of times."""
        every = self.no_rope_freq
        return isinstance(every, int) and every > 0 and self.job.model.layers % every > 0

    @property
    def has_cut_biases(self) -> bool:
        """Whether tensor-parallel ranks share experts that have biases."""
        own = self.job
        return bool(own.model.num_experts and own.model.add_bias_linear and own.parallel.expert_tensor > 1)

    @property
    def has_uneven_groups(self) -> bool:
        """Whether groups of experts, among which routers choose, are not equally large."""
        groups = self.moe_router_num_groups if self.moe_router_group_topk else 0
        return bool(groups and self.job.model.num_experts % groups)

    @property
    def has_too_few_groups(self) -> bool:
        """Whether a router is to choose more groups of experts than there are."""
        return (self.moe_router_group_topk or 0) > (
            self.moe_router_num_groups or self.moe_router_group_topk or 0
        )

    @property
    def has_zero_gradient(self) -> bool:
        """Whether a score of one expert alone would be normalized to 1."""
        is_softmax = self.moe_router_score_function in (None, "softmax")
        is_sinkhorn = "sinkhorn" in str(self.moe_router_load_balancing_type)
        return is_softmax and not is_sinkhorn and not self.moe_router_pre_softmax

    @property
    def has_single_group(self) -> bool:
        """Whether weights or biases of all experts are one tensor."""
        return bool(self.moe_single_grouped_weight or self.moe_single_grouped_bias)

    @property
    def pads_routing(self) -> bool:
        """Whether each expert's tokens are padded for products in FP8."""
        return bool(self.moe_router_padding_for_fp8 or self.moe_router_padding_for_quantization)

    @property
    def can_pad_routing(self) -> bool:
        """Whether there is something to pad tokens for, and a dispatcher that does."""
        return bool(self.fp8 or self.fp4) and self.moe_token_dispatcher_type in ("alltoall", "flex")

    @property
    def unknown_modules(self) -> str:
        """The modules to be recomputed that Megatron does not have, in words; empty without one."""
        return " ".join(sorted({*(self.recompute_modules or ())} - set(MODULES)))

    @property
    def known_modules(self) -> str:
        """The modules that can be recomputed, in words."""
        return ", ".join(MODULES)

    @property
    def can_distribute(self) -> bool:
        """Whether tensor-parallel ranks can each save a part of the input of recomputed layers."""
        is_shared = self.job.parallel.tensor_model_parallel_size > 1 and not self.sequence_parallel
        return is_shared and self.recompute_granularity == "full"

    @property
    def has_mxfp8(self) -> bool:
        """Whether products are computed in MXFP8."""
        return bool(self.fp8) and self.fp8_recipe == "mxfp8"

    @property
    def fuses_bias(self) -> bool:
        """Whether the activation is fused with the bias before it, by Megatron's own kernels."""
        return bool(
            self.bias_swiglu_fusion if self.swiglu else self.bias_gelu_fusion and self.add_bias_linear
        )

    @property
    def fuses_rope(self) -> bool:
        """Whether rotary positions are applied by one kernel."""
        return bool(self.apply_rope_fusion) and self.position_embedding_type == "rope"

    @property
    def chunk_flag(self) -> str:
        """The flag by which Megatron cuts a rank's layers into chunks, if one does."""
        return next(filter(self.is_set, layers.CHUNKS), "")

    @property
    def has_chunk_flag(self) -> bool:
        """Whether a flag gives a rank several chunks."""
        chunks = layers.chunks_requested(self.job)
        return chunks is not None and chunks > 1

    @property
    def has_other_hierarchy(self) -> bool:
        """Whether the sizes of levels do not make the context-parallel size."""
        levels = self.hierarchical_context_parallel_sizes
        return bool(levels) and math.prod(levels) != self.job.parallel.context_parallel_size

    @property
    def can_be_precision_aware(self) -> bool:
        """Whether the optimizer is one whose state may have fewer bits."""
        return self.job.memory.optimizer == "adam" and self.job.memory.use_distributed_optimizer

    @property
    def short_state(self) -> str:
        """The flag that gives the optimizer's state fewer bits; empty without one."""
        names = "--main-grads-dtype", "--main-params-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype"
        return next((flag for flag in names if self[flag[2:].replace("-", "_")] not in (None, "fp32")), "")

    @property
    def has_ends(self) -> bool:
        """Whether the first or the last rank has a number of layers of its own."""
        return bool(layers.given_ends(self.job))

    @property
    def split_flag(self) -> str:
        """The flag by which an end of the model counts as a layer; empty without one."""
        return next(filter(self.is_set, layers.SPREAD[len(layers.ENDS) :]), "")

    @property
    def described_twice(self) -> str:
        """The flag that spreads layers over stages in another way than a pattern; empty without one."""
        others = (*layers.SPREAD[len(layers.ENDS) :], *layers.CHUNKS, layers.LAYOUT)
        return next(filter(self.is_set, others), "")

    @property
    def ends_alone(self) -> str:
        """The flag that gives an end of a pipeline its layers where there is none; empty without one."""
        is_alone = self.job.parallel.pipeline_model_parallel_size == 1
        return next(iter(layers.given_ends(self.job)), "") if is_alone else ""
