"""How many parameters a model has, and how many of them a token uses."""

from dataclasses import asdict, dataclass

from megatron_pp_ext.costs.model_parts import model_parts
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.job.typed_job import Job


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of weights of the whole model, each counted once.

    ``active_parameters`` are the ones that a token is multiplied by or added to: of experts the chosen ones,
    and no embedding or learned positions, of which a token takes one row.  A tied weight is used as the
    output layer.
    """

    parameters: int
    active_parameters: int


def parameters(job: Job) -> Parameters:
    """Return the parameters of ``job``'s whole model, with MTP."""
    alone = job.changed(
        tensor_model_parallel_size=1,
        sequence_parallel=False,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=None,
        padded_vocab_size=job.padded_vocabulary,
    )
    model = model_parts(alone)
    total = sum(model.layers, model.last_norm + model.output)
    if depths := job.model.mtp_num_layers:
        prediction = model.prediction
        total += prediction.repeated(depths) if job.model.mtp_use_repeated_layer else prediction.times(depths)
    looked_up = model.positions + (model.table if job.model.untie_embeddings_and_output_weights else Part())
    routed_share = job.model.moe_router_topk / (job.model.num_experts or 1)
    return Parameters(
        parameters=round(total.parameters + total.expert_parameters + looked_up.parameters),
        active_parameters=round(total.parameters + routed_share * total.expert_parameters),
    )


def entries(job: Job) -> dict[str, int]:
    """Return the counts for a result by name: none for measured stages, whose layers may be unknown."""
    return {} if job.pipeline.pipeline_costs else asdict(parameters(job))
