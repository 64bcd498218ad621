"""What a shared vocabulary and pairs cannot do with."""

from megatron_pp_ext.job.rules.rule import Rule, Rules
from megatron_pp_ext.schedule.names import SHARED

_SCHEDULE = "--pipeline-schedule {pipeline_schedule}"
_VOCABULARY = "--pipeline-vocabulary {pipeline_vocabulary}"

_SHARING = Rules(
    "Beside a shared vocabulary, also under `auto`",
    lambda asked: asked.pipeline_vocabulary,
    rows=(
        Rule(
            _VOCABULARY,
            "has no effect under Megatron's own schedules",
            "add --pipeline-schedule, 1f1b for example",
            lambda asked: not asked.has_schedule and not asked.rehearse_pipeline,
        ),
        Rule(
            _VOCABULARY,
            f"does not support {_SCHEDULE}: every stage updates its weights by itself there, and the "
            "vocabulary would belong to all of them",
            "choose a schedule that flushes, or leave the flag out",
            lambda asked: not asked.can.flushes,
        ),
        Rule(
            _VOCABULARY,
            f"does not support {_SCHEDULE}: the file has no place for the parts of the vocabulary",
            "choose a schedule by name, or leave the flag out",
            lambda asked: asked.can.file,
        ),
    ),
)

VOCABULARY = Rules(
    "Beside a shared vocabulary; `auto` does not share it then",
    lambda asked: asked.pipeline_vocabulary == SHARED,
    beside=_VOCABULARY,
    rows=(
        Rule("--mtp-num-layers", "multi-token prediction has logits of its own"),
        Rule("--init-model-with-meta-device", "the rows are dealt out as the model is built"),
        Rule(
            "--tensor-parallel-num-weight-shards",
            "rows of the vocabulary would be cut twice",
            asked=lambda asked: asked.gathers_weights,
        ),
        Rule(
            "--pipeline-profile-steps", "its measurements do not tell a rank's part of the vocabulary apart"
        ),
    ),
)

FLAG = "--overlap-moe-expert-parallel-comm"

_PAIRS = Rules(
    f"Beside `{FLAG}`",
    lambda asked: asked.overlap_moe_expert_parallel_comm and asked.has_schedule,
    beside=FLAG,
    rows=(
        Rule(
            _SCHEDULE,
            "its order has no pairs",
            "choose {paired_schedules}, or leave the flag out",
            lambda asked: not asked.can.has_pairs,
        ),
        # Megatron's own conditions (TransformerConfig), which it checks only when the model is built.
        Rule(
            "--expert-model-parallel-size 1",
            "tokens then stay on their rank, and nothing is to be hidden",
            "set it to 2 or more",
            lambda asked: asked.expert_model_parallel_size < 2,
        ),
        Rule(
            "--moe-token-dispatcher-type allgather",
            "it gathers the tokens of all ranks in one piece",
            "choose alltoall or flex",
            lambda asked: asked.moe_token_dispatcher_type not in ("alltoall", "flex"),
        ),
        Rule(
            "training in full precision",
            "Megatron plans its layers in half precision alone",
            "add --bf16 or --fp16",
            lambda asked: not (asked.bf16 or asked.fp16),
        ),
        Rule(
            "--recompute-granularity full",
            "a plan takes apart the layers that it would compute again as a whole",
            "choose selective, or leave one of the two out",
            lambda asked: asked.recompute_granularity == "full",
        ),
        Rule(
            "--recompute-modules moe",
            "its tokens would have to leave twice",
            "choose others, such as core_attn",
            lambda asked: "moe" in (asked.recompute_modules or ()),
        ),
        Rule("--moe-shared-expert-overlap", "a plan runs shared experts beside the attention"),
        Rule(
            "--mtp-num-layers above 1",
            "a plan knows one prediction",
            "set it to 1",
            lambda asked: (asked.mtp_num_layers or 0) > 1,
        ),
        # What schedules cannot do with pairs.
        Rule("--pipeline-vocabulary", "its exchanges have no place within a pair"),
        Rule("--pipeline-profile-steps", "it measures forwards and backwards that run alone"),
    ),
)

_NEEDED_FOR_PAIRS = Rules(
    "What pairs need",
    lambda asked: asked.has_schedule,
    rows=(
        Rule(
            FLAG,
            f"needs pairs, and {_SCHEDULE} has none",
            "write (3F1;3B0)OVERLAP_F_B for two actions that run together, or leave the flag out",
            lambda asked: (
                asked.overlap_moe_expert_parallel_comm and asked.from_file and not asked.from_file.paired
            ),
        ),
        Rule(
            FLAG,
            f"with {_SCHEDULE} needs to know what a pair takes",
            'give --pipeline-costs a file with a "pair", the part of the sum of its two actions, or leave '
            "the flag out",
            lambda asked: (
                asked.overlap_moe_expert_parallel_comm
                and asked.can.takes_limit
                and asked.pipeline_costs is None
            ),
        ),
        Rule(
            _SCHEDULE,
            f"has pairs (OVERLAP_F_B), which Megatron runs with {FLAG}",
            "add it",
            lambda asked: (
                not asked.overlap_moe_expert_parallel_comm and asked.from_file and asked.from_file.paired
            ),
        ),
    ),
)

RULES = (_SHARING, VOCABULARY, _NEEDED_FOR_PAIRS, _PAIRS)
