"""What cannot go with initial weights of their own seed in each layer."""

from megatron_pp_ext.job.rules.rule import Rule, Rules

RULES = (
    Rules(
        title="With `--pipeline-layer-seeds`",
        when=lambda job: job.flags.pipeline_layer_seeds,
        subject="--pipeline-layer-seeds",
        rows=(Rule("--init-model-with-meta-device", "weights are drawn after the model is built there"),),
    ),
)
