"""The seams of stages with different numbers of replicas."""

from megatron_pp_ext.integration.core import replicated_ranks
from megatron_pp_ext.integration.patching import Seam
from megatron_pp_ext.integration.releases import CORE_0_17

REPLICAS = (
    Seam(
        "megatron.core.parallel_state:RankGenerator.get_ranks",
        {CORE_0_17: "self token"},
        replicated_ranks.list_groups,
        "process groups for stages with different numbers of replicas",
    ),
    Seam(
        "megatron.core.optimizer.optimizer:MegatronOptimizer.get_grad_stats_parallel_group",
        {CORE_0_17: "self"},
        replicated_ranks.keep_statistics_in_replica,
        "clipping where the ranks of a stage are in several pipelines",
    ),
    Seam(
        "megatron.training.datasets.data_samplers:MegatronPretrainingSampler.__init__",
        {
            CORE_0_17: "self total_samples consumed_samples micro_batch_size data_parallel_rank "
            "data_parallel_size drop_last"
        },
        replicated_ranks.take_turns,
        "microbatches that the replicas of a stage take in turn",
    ),
)
