"""Measured costs as a file: JSON with one object for each stage, in model order.

    {"hop": 0.0006, "message": 1.7e7,
     "stages": [{"forward": 0.0185, "input_gradient": 0.0181, "weight_gradient": 0.0093,
                 "activation": 5.1e8, "released_by_input_gradient": 1.2e8, "copy": 0.0095,
                 "hidden": 0.002, "workspace": 0, "workspace_in_whole": 0,
                 "parameters": 4.1e8, "expert_parameters": 2.0e9}, ...],
     "sizes": {"seq_length": 4096, "micro_batch_size": 1, ...}}

The names are those of ``StageCosts`` and ``Costs``; ``released_by_input_gradient`` is below 0 where an I
keeps more than its forward did.  Times are in seconds, activations and a message in bytes
or any other common unit.  ``hop``, ``message``, ``pair``, ``sizes`` and all of a stage but its times may be
left out.
An estimate of a step takes seconds, bytes and ``parameters``.  Where the ranks split the head,
``Costs.head`` (``in_files``) is an object with the names of ``HeadCosts``.  Anything else is refused, since
a misspelt name would otherwise leave a default in force.
"""

from pathlib import Path

from megatron_pp_ext.files import write_json
from megatron_pp_ext.json_input import naming, read_as
from megatron_pp_ext.schedule.costs import Costs, as_written


def write(costs: Costs, path: str | Path) -> None:
    """Write ``costs`` to ``path``."""
    content = {name: value for name, value in as_written(costs).items() if value not in (None, {}, ())}
    write_json(Path(path), content)


def read(path: str | Path, stages: int | None = None) -> Costs:
    """Read the costs in ``path``, which must be for ``stages`` stages if that is given.

    Raises ValueError, naming the file and the stage, for anything that is not as described above.
    """
    with naming(path):
        costs = read_as(Costs, Path(path), "write {'hop': ..., 'stages': [...]}")
        if stages is not None and len(costs.stages) != stages:
            raise ValueError(
                f"has costs for {len(costs.stages)} stages, but there are {stages} (ranks x chunks): "
                f"give {stages} objects in 'stages'"
            )
        return costs
