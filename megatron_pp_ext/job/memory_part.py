"""A ``Job``'s memory: recomputation, offloading and the optimizer's state, in the words of the flags."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Memory:
    """The settings of activations and of the optimizer's state.

    ``recompute_num_layers`` is 0 where nobody gives it.
    """

    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int = 0
    recompute_modules: tuple[str, ...] = ()
    distribute_saved_activations: bool = False
    optimizer: str = "adam"
    sgd_momentum: float = 0.9
    use_distributed_optimizer: bool = False
    use_megatron_fsdp: bool = False
    data_parallel_sharding_strategy: str = "optim_grads_params"
    muon_num_ns_steps: int = 5
    muon_scalar_optimizer: str = "adam"
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 1.0
    overlap_cpu_optimizer_d2h_h2d: bool = False
    cpu_offloading_num_layers: int = 0
    main_params_dtype: str = "fp32"
    exp_avg_dtype: str = "fp32"
    exp_avg_sq_dtype: str = "fp32"

    @property
    def shards_state(self) -> bool:
        """Whether data-parallel ranks share the optimizer's state, with Muon by whole weights."""
        is_sharded = self.use_megatron_fsdp and self.data_parallel_sharding_strategy != "no_shard"
        return self.use_distributed_optimizer or is_sharded or self.optimizer == "dist_muon"

    @property
    def shards_gradients(self) -> bool:
        """Whether data-parallel ranks share gradients, which are reduced in each microbatch."""
        return self.use_megatron_fsdp and self.data_parallel_sharding_strategy.startswith("optim_grads")

    @property
    def shards_weights(self) -> bool:
        """Whether data-parallel ranks share weights, which are gathered for each forward and backward."""
        return self.use_megatron_fsdp and self.data_parallel_sharding_strategy == "optim_grads_params"

    @property
    def treats_matrices_apart(self) -> bool:
        """Whether the optimizer is for matrices of layers alone, and other weights have one of their own."""
        return self.optimizer not in ("adam", "sgd")

    @property
    def offloaded(self) -> float:
        """The part of the optimizer's state that is on the host, and updated there."""
        return self.optimizer_offload_fraction if self.optimizer_cpu_offload else 0.0

    @property
    def recomputed(self) -> frozenset[str]:
        """The modules of a layer that backwards compute again, where not whole layers are."""
        if self.recompute_granularity != "selective":
            return frozenset()
        return frozenset(self.recompute_modules or ("core_attn",))

    @property
    def recomputes_layers(self) -> bool:
        """Whether backwards compute whole layers again."""
        return self.recompute_granularity == "full"

    @property
    def recomputes_first(self) -> bool:
        """Whether these are the first ones of each stage, and not all in groups."""
        return self.recompute_method == "block"

    @property
    def recomputed_together(self) -> int:
        """The layers of such a group, or the first ones of a stage."""
        return self.recompute_num_layers or 1
