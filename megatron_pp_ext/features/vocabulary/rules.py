"""The limits of vocabulary parallelism: flags that it does not support."""

from megatron_pp_ext.features.vocabulary.options import SHARED
from megatron_pp_ext.job.rules.rule import Rule, Rules
from megatron_pp_ext.job.rules.schedules import gathers_weights

RULES = (
    Rules(
        title="With a shared vocabulary, also under `auto`",
        when=lambda job: job.pipeline.pipeline_vocabulary,
        rows=(
            Rule(
                "--pipeline-vocabulary {pipeline_vocabulary}",
                "has no effect under Megatron's own schedules",
                "add --pipeline-schedule, 1f1b for example",
                when=lambda job: not job.pipeline.has_schedule and not job.flags.rehearse_pipeline,
            ),
            Rule(
                "--pipeline-vocabulary {pipeline_vocabulary}",
                "does not support --pipeline-schedule {pipeline_schedule}: every stage updates its "
                "weights by itself there, and the vocabulary would belong to all of them",
                "choose a schedule that flushes, or leave the flag out",
                when=lambda job: not job.pipeline.can.flushes,
            ),
            Rule(
                "--pipeline-vocabulary {pipeline_vocabulary}",
                "does not support --pipeline-schedule {pipeline_schedule}: the file has no place for the "
                "parts of the vocabulary",
                "choose a schedule by name, or leave the flag out",
                when=lambda job: job.pipeline.can.file,
            ),
        ),
    ),
    Rules(
        title="With a shared vocabulary; `auto` does not share it then",
        when=lambda job: job.pipeline.pipeline_vocabulary == SHARED,
        subject="--pipeline-vocabulary {pipeline_vocabulary}",
        auto_of="--pipeline-vocabulary",
        rows=(
            Rule("--mtp-num-layers", "multi-token prediction has logits of its own"),
            Rule("--init-model-with-meta-device", "the rows are dealt out as the model is built"),
            Rule(
                "--tensor-parallel-num-weight-shards",
                "rows of the vocabulary would be cut twice",
                when=gathers_weights,
            ),
            Rule(
                "--pipeline-profile-steps",
                "its measurements do not tell a rank's part of the vocabulary apart",
            ),
        ),
    ),
)
