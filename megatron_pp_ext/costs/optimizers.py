"""What optimizers keep for each weight and take for an update, and the bytes of a rank's state.

Adam: arXiv 1412.6980; Lion: arXiv 2302.06675; Muon: arXiv 2502.16982; adaptive Muon, which has the second
moments of AdaMuon: arXiv 2507.11005.  All but Adam and SGD are for the matrices of layers; embedding, output
layer, norms and biases have a scalar optimizer then (megatron.core.optimizer.emerging_optimizers).
"""

from dataclasses import dataclass
from typing import Self

from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.costs.system import System
from megatron_pp_ext.job.typed_job import Job, Memory

SIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""The bytes of a number by the name of its format."""

_MOMENTS = {"adam": 2, "sgd": 1, "lion": 1, "muon": 1, "dist_muon": 1, "adaptive_muon": 2}
"""The numbers that an optimizer remembers for each weight."""

_MUON = ("muon", "dist_muon", "adaptive_muon")

_TRAFFIC = 22
"""The bytes of memory traffic for each weight that is updated, without moments: the gradient is read for its
norm and again, its clipped value written; the fp32 weight is read and written; the new weight is written.
Moments are read and written too."""

_HOST_TRAFFIC, _HOST_COPIES = 28, 4
"""The bytes of an update of a weight by Adam on the host, where gradient, weight and both moments are read
and all but the gradient are written, and those of the gradient that comes there, or of the weight that goes
back."""


@dataclass(frozen=True, slots=True)
class Update:
    """The work of one update of a rank's weights.

    ``traffic`` are the bytes of device memory that it reads and writes besides gradients, ``offloaded`` the
    weights that are updated on the host.  An iteration of Muon has ``orthogonal`` operations, ``largest`` of
    them on one matrix.
    """

    traffic: float
    offloaded: float
    orthogonal: float
    largest: float


def moment_bytes(memory: Memory, matrices: float) -> float:
    """Return the bytes of moments for each weight, of which so large a part is in ``matrices``."""
    moments, scalar = _of_kind(memory, memory.optimizer), _of_kind(memory, _scalar(memory))
    return matrices * moments + (1 - matrices) * scalar


def _scalar(memory: Memory) -> str:
    """Return the optimizer of weights other than the matrices of layers."""
    if memory.optimizer in _MUON:
        return memory.muon_scalar_optimizer
    return "adam" if memory.optimizer == "lion" else memory.optimizer


def _of_kind(memory: Memory, optimizer: str) -> float:
    if optimizer == "adam":
        return SIZES.get(memory.exp_avg_dtype, 4) + SIZES.get(memory.exp_avg_sq_dtype, 4)
    if optimizer == "sgd" and not memory.sgd_momentum:
        return 0
    return 4 * _MOMENTS[optimizer]


def update(job: Job, part: Part, updated: float, moments: float, dense: float, expert: float) -> Update:
    """Return the update of a rank that has ``part`` and updates so many weights, with ``moments`` bytes each.

    ``dense`` and ``expert`` are the numbers of ranks that share the update of either kind.  Muon's matrices
    are given to ranks whole (``LayerWiseDistributedOptimizer``), so that no rank has less to do than the
    largest one takes.
    """
    memory = job.memory
    has = part.matrices if memory.optimizer in _MUON else None
    orthogonal = has.operations / dense + has.expert_operations / expert if has else 0.0
    return Update(
        traffic=(_TRAFFIC + 2 * moments) * (1 - memory.offloaded) * updated,
        offloaded=memory.offloaded * updated,
        orthogonal=max(orthogonal, has.largest) if has else 0.0,
        largest=has.largest if has else 0.0,
    )


def update_seconds(job: Job, system: System, work: Update, gradients: float) -> float:
    """Return the seconds of an update of a rank on ``system``, whose gradients are so many bytes.

    Iterations of Muon run at the rate of a square product with as many operations as the largest matrix.
    ValueError where weights are updated on the host of a system that does not describe it.
    """
    seconds = (work.traffic + gradients) / system.copy_bytes_per_second
    if work.orthogonal:
        side = (work.largest / 6) ** (1 / 3)
        iterations = job.memory.muon_num_ns_steps
        seconds += iterations * work.orthogonal / system.rate(system.half, side, side, side)
    return seconds + _host_seconds(job.memory, system, work.offloaded)


def _host_seconds(memory: Memory, system: System, weights: float) -> float:
    """Return the seconds in which the host updates so many ``weights``, and of their way there and back."""
    if not weights:
        return 0.0
    host = system.host_beside_others
    if host is None or not system.host_memory_bytes_per_second:
        raise ValueError(
            f"system {system.name} describes no host, which --optimizer-cpu-offload needs: give it host and "
            "host_memory_bytes_per_second"
        )
    copying = host.seconds(_HOST_COPIES * weights)
    computing = _HOST_TRAFFIC * weights / system.host_memory_bytes_per_second
    if memory.overlap_cpu_optimizer_d2h_h2d:
        return max(copying, computing)
    return 2 * copying + computing


@dataclass(frozen=True, slots=True)
class Sharing:
    """The numbers of ranks that have the same dense and expert weights, and sum their gradients."""

    dense: int
    expert: int

    def of_state(self, memory: Memory) -> Self:
        """Return the numbers of ranks that share the optimizer's state, 1 where each has all of it.

        The ranks of an instance of the distributed optimizer share one copy of it
        (megatron.core.parallel_state).
        """
        if not memory.shards_state:
            return type(self)(1, 1)
        return type(self)(self.dense // memory.instances, max(1, self.expert // memory.instances))


@dataclass(frozen=True, slots=True)
class ModelState:
    """The bytes of a rank, and the update of its weights."""

    weights: float
    gradients: float
    optimizer: float
    update: Update


def _fp8_copies(job: Job) -> float:
    """Return the bytes of the FP8 or FP4 copies of a weight.

    Transformer Engine keeps two FP8 copies of a weight from a step's first microbatch on, one of which is
    transposed (module/linear.py, as Megatron 0.17 to 0.19 call it).  With --fp8-param-gather these two are
    all there is of the weight, as many bytes as it has in half precision.
    """
    return 0 if job.precision.keeps_operands else 2 * job.precision.operand_size


def model_state(job: Job, part: Part, sharing: Sharing) -> ModelState:
    """Return the state of a rank of ``job`` whose stages add up to ``part``."""
    total = part.parameters + part.expert_parameters
    state = sharing.of_state(job.memory)
    dense, expert = state.dense, state.expert
    updated = part.parameters / dense + part.expert_parameters / expert
    matrix_weights = part.matrices.parameters if part.matrices else 0.0
    matrices = matrix_weights / dense + part.expert_parameters / expert
    moments = moment_bytes(job.memory, matrices / updated if updated else 0.0)
    weights = job.precision.weight_size * total + _fp8_copies(job) * part.fp8_parameters
    share = updated / total if total else 0.0
    return ModelState(
        weights=weights * (share if job.memory.shards_weights else 1.0),
        gradients=job.precision.gradient_size * total * (share if job.memory.shards_gradients else 1.0),
        optimizer=(moments + _copies(job)) * updated * (1 - job.memory.offloaded),
        update=update(job, part, updated, moments, dense, expert),
    )


def _copies(job: Job) -> float:
    """Return the bytes of the fp32 copy of each weight in half precision, and of that of its gradient."""
    if not job.precision.is_half:
        return 0
    copy = SIZES.get(job.memory.main_params_dtype, 4)
    # Where state is not shared out, half-precision gradients are copied to fp32 for the update.
    return copy + (4 if job.precision.gradient_size == 2 and not job.memory.shards_state else 0)
