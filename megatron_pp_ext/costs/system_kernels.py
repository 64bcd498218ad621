"""The seconds that the kernels and the collectives of a layer take on a machine."""

from dataclasses import dataclass, replace
from operator import itemgetter

from megatron_pp_ext.costs.kernels import AttentionWork, KernelSeconds
from megatron_pp_ext.costs.part import Part
from megatron_pp_ext.costs.system import System, interpolated
from megatron_pp_ext.job.typed_job import Job

_LOST_AT_THE_END = 0.8
"""The loss of attention while its last tiles end, in tiles: queries see unequally many keys.  Fitted, like
``attention_rates``, to one half of the measured kernels (benchmarks/results/components.md)."""


def attention_rate(
    system: System, width: float, keys: float, tiles: float, masked: float = 0, is_backward: bool = False
) -> float | None:
    """Return the operations a second of fused attention, whose masked ones do not count.

    They are those of its forward, or of its backward if ``is_backward``.  Heads have a ``width``, and
    queries see so many ``keys`` on average; there are so many ``tiles`` of ``_ATTENTION_TILE`` queries.
    With them ``masked`` keys are computed, which do not count.  Rows are
    interpolated between widths.  None where it is not known.
    """
    rows = (is_backward and system.attention_backward_rates) or system.attention_rates
    if not rows:
        return None
    rows = sorted(rows, key=itemgetter(0))
    rate, around = (interpolated([(row[0], row[column]) for row in rows], width) for column in (1, 2))
    filled = 1.0
    if system.processors:
        per_processor = tiles / system.processors
        filled = per_processor / max(1.0, per_processor + _LOST_AT_THE_END)
    return system.sustained.get("clock", 1.0) * rate * filled * keys / (keys + masked + around)


_CAPABILITY = {"delayed": 8.9, "tensorwise": 8.9, "blockwise": 9.0, "mxfp8": 10.0}
"""The compute capability of NVIDIA's GPUs from which Transformer Engine has a recipe (quantization.py)."""


def require_fp8(system: System, recipe: str) -> None:
    """Raise ValueError unless products of ``system`` run in FP8 with --fp8-recipe ``recipe``."""
    recipes = (
        [name for name in _CAPABILITY if name != "mxfp8"]
        if system.fp8_recipes is None
        else system.fp8_recipes
    )
    if recipe in recipes:
        return
    fix = f"choose {' or '.join(recipes)}" if recipes else "leave --fp8-format out"
    why = f"Transformer Engine has it from compute capability {_CAPABILITY.get(recipe, 'unknown')} on"
    if system.fp8_recipes is not None and recipe == "blockwise" and recipes:
        why = "no rate of its products is known"
    elif system.fp8_recipes is None:
        fix += f', or add "fp8_recipes" to the file, where {recipe} runs'
    raise ValueError(
        f"--fp8-recipe {recipe} is not for system {system.name}: {why}; {fix}, or another --system"
    )


def require_fp4(system: System) -> None:
    """Raise ValueError unless products of ``system`` run in NVFP4."""
    if system.matrix_rates.get("fp4"):
        return
    raise ValueError(
        f"--fp4-format is not for system {system.name}: Transformer Engine has it from compute capability "
        "10.0 on; leave --fp4-format out, or choose another --system, or add the rates of fp4 to the file"
    )


_START = 3.7e-5
"""The seconds in which such a kernel starts and sends all ranks the number of tokens: fitted, like
``_OWN``, to one half of DeepEP's dispatches and combinations on 8 H100 (ai-dynamo/aiconfigurator, commit
095f58a51, comm/sglang 0.5.12)."""

_OWN = 1.6
"""The way of a token out of its own rank or back into it, as a part of the way to another."""


_LAYOUT = {"deepep": 1e-4}
"""What an exchange takes besides, by the dispatcher: DeepEP first counts the tokens of each rank, and its
host waits for them.  It is half of what layers of experts on 8 H100 take longer with it than with HybridEP,
in bf16 (NVIDIA/Megatron-LM, commit 32f2c9cfd, tests/functional_tests/test_cases/common/moe_perf)."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token finds its ``chosen`` experts, of ``limit`` of all ``groups`` of them, or of any if 0."""

    chosen: int
    groups: int = 0
    limit: int = 0

    def reached(self, places: float) -> float:
        """Return how many of ``places``, over which experts are spread in order, a token's experts are at."""
        if not self.groups or not 0 < self.limit < self.groups:
            return _reached(self.chosen, places)
        if places < self.groups:
            return _reached(self.limit, places)
        return self.limit * _reached(self.chosen / self.limit, places / self.groups)


def sent_once_seconds(
    system: System, size: float, routing: Routing, ranks: int, stride: int, backend: str = ""
) -> float:
    """Return the seconds in which every rank sends its ``size`` bytes of tokens, or gets them back.

    Each token goes to the ranks that have one of its experts, which are spread evenly over ``ranks`` that are
    ``stride`` apart.  Links within nodes and between them work at the same time.  ``backend`` is the
    dispatcher's, whose host's time counts; none for its kernels alone.

    DeepEP, for one, sends a token into each node once, over the network, and from there to the ranks of the
    node (https://github.com/deepseek-ai/DeepEP, legacy documentation).
    """
    if ranks < 2 or size <= 0:
        return 0.0
    near = system.in_a_node(ranks, stride)
    nodes = ranks / near
    inside = size * (routing.reached(ranks) * (1 - 1 / near) + _OWN) / system.node.bytes_per_second
    between = size * routing.reached(nodes) * (1 - 1 / nodes) / system.between_nodes.bytes_per_second
    return _START + _LAYOUT.get(backend, 0.0) + max(inside, between)


def _reached(top_k: float, places: float) -> float:
    """Return how many of ``places`` have one of ``top_k`` experts that are chosen at random."""
    return places * (1 - (1 - 1 / places) ** top_k)


_FUSED_RATE = 0.7
"""The rate of fused attention as a fraction of a plain product's.

FlashAttention-2 (arXiv 2307.08691, figures 5 and 6), causal, heads of 128, sequences of 2k and more: some
170 to 200 TFLOP/s on an A100, where plain products reach 268."""

_FUSED_BACKWARD = 2.5
"""The products in the backward of fused attention for each one of the forward (same source, section 4.1).

They run at the forward's rate where a system has none of their own (``attention_backward_rates``)."""

_RANDOM_FORWARD = 1.5
"""The time that dropout's random numbers add to the forward of fused attention with heads of 128, and again
to the backward, which makes them a second time, as a part of that forward.

A Philox 4x32-10 takes ten rounds of eight integer operations for four numbers (Salmon et al., SC 2011), and a
processor does 64 a cycle: as long as 760 operations of attention on an H100, whose scores take 512 each.
arXiv 2410.07531 has a whole layer of Llama 2 1.14 times faster, and of Llama 3 1.22 times, where products
hide them, in FP8 on an H100."""

_RANDOM_WIDTH = 128
"""The width of a head for which it does: there is one number for a score, however wide heads are."""

_STREAMED = 0.9
"""The part of device memory's rate that large copies reach (benchmarks/planner/kernels_alone.py)."""

_ATTENTION_TILE = 128
"""The queries that a processor works on at a time in fused attention (arXiv 2307.08691, section 3.3)."""

_DELTA_RATE = 0.12
"""The rate of a gated delta rule's forward as a fraction of a plain product's.

With heads of 128 a token of a head takes 2.0 to 3.2 ns on an H100, the less the more heads there are, for
the 184,000 operations that are counted here, where plain products reach 744 TFLOP/s
(ai-dynamo/aiconfigurator, commit 095f58a51, linear_attention/trtllm 1.3.0rc20)."""

_DELTA_BACKWARD = 3.0
"""The backward of a delta rule for each forward: the forward again, and two of the kind for its gradients.
This is assumed; no measurement of a backward was found."""

_SCANNED_RATE = 0.2
"""The part of device memory's rate at which the kernels of Mamba-2's scan read and write.

That scan, with states of 64, takes as long as FlashAttention-2 over 2,048 tokens on an A100
(arXiv 2405.21060, figure 10), which is 0.18; TensorRT-LLM's forward reaches 0.27 on a B200
(ai-dynamo/aiconfigurator, commit 095f58a51, linear_attention/trtllm/1.3.0rc15)."""

_SCANNED_BACKWARD = 3.0
"""The backward of a scan for each forward: the forward again, and two of the kind for its gradients.  This is
assumed; no measurement of a backward was found."""

_MICROSCALED = 1.05
"""How much longer products in MXFP8 take than those in FP8 with one scale for each operand.

On a B300 the products of a layer with a hidden size of 4,096 took 7.16 ms in place of 6.81
(NVIDIA/TransformerEngine, commit d0067d0d, docs/examples/gemm_profiling)."""

FLEXIBLE_PROCESSORS, _COLLECTIVE_PROCESSORS = 20, 32
"""The processors that an exchange of tokens takes: those of DeepEP, by the default of --moe-deepep-num-sms,
and those of NCCL's all-to-all, one for each channel (32 on H100: those of its rings, rounded up to a power of
two, ``ncclTopoComputeP2pChannels``)."""

_SECOND_ROUND = 0.5
"""The rate of a product whose last blocks start when the first ones have ended.

On an H100 an additional round of blocks next to NCCL was seen to nearly double the time of a product
(forums.developer.nvidia.com/t/339078)."""


class SystemKernelSeconds(KernelSeconds):
    """Seconds on ``system`` for the parallel sizes and the number format of ``job``.

    Megatron's ranks count tensor, context, data and pipeline parallelism from the inside outwards, so
    tensor-parallel neighbours are 1 apart and context-parallel ones a tensor-parallel size.

    A product runs at the rate of its shape, unless reading and writing its operands takes longer.  Copies
    count too, and collectives of the tensor-, context- and expert-parallel groups.
    """

    def __init__(self, system: System, job: Job) -> None:
        self._system = system
        precision, parallel = job.precision, job.parallel
        self._half = "bf16" if precision.is_half else "fp32"
        self._dtype, self._operand = precision.format, precision.operand_size
        self._is_fp8 = self._dtype in ("fp8", "fp4")
        if self._dtype == "fp4":
            require_fp4(system)
        elif self._is_fp8:
            require_fp8(system, precision.fp8_recipe)
            self._dtype = "fp8_block" if precision.fp8_recipe == "blockwise" else "fp8"
        is_microscaled = self._dtype == "fp8" and precision.fp8_recipe == "mxfp8"
        self._slower = _MICROSCALED if is_microscaled else 1.0
        self._bytes = precision.weight_size
        self._tensor = parallel.tensor_model_parallel_size
        self._overlaps = parallel.tp_comm_overlap and parallel.sequence_parallel
        self._context = parallel.context_parallel_size
        self._expert = parallel.expert_model_parallel_size
        self._expert_tensor = parallel.expert_tensor
        self._drops = job.model.attention_dropout > 0
        is_fp4 = self._dtype == "fp4"
        self._scales_first = is_fp4 or precision.fp8_recipe == "tensorwise"
        self._norms_cast = not is_fp4 and precision.fp8_recipe == "delayed"
        self._norms_scale = not is_fp4 and precision.fp8_recipe == "tensorwise"
        is_by_tensor = not is_fp4 and precision.fp8_recipe in ("delayed", "tensorwise")
        self._casts_once = is_by_tensor and system.multiplies_any_layout
        self._sends_once = parallel.moe_token_dispatcher_type == "flex"
        self._backend = parallel.moe_flex_dispatcher_backend
        model = job.model
        self._routing = Routing(
            model.moe_router_topk, model.moe_router_num_groups, model.moe_router_group_topk
        )
        self._graphs = precision.cuda_graph_impl

    def product(
        self, m: float, n: float, k: float, adds: bool = False, is_output: bool = False, groups: float = 1
    ) -> float:
        """Return the seconds at the shape's rate, or of reading and writing the operands if longer."""
        dtype = self._half if is_output else self._dtype
        slower = 1.0 if is_output else self._slower
        seconds = slower * 2 * groups * m * n * k / self._system.rate(dtype, m, n, k, groups)
        read = (self._bytes if is_output else self._operand) * (m * k + k * n)
        output_bytes = (8 if adds else self._bytes) * m * n
        exposed = self._system.exposed_sums * output_bytes if adds else 0.0
        exposed_seconds = groups * exposed / self._system.copy_bytes_per_second
        return max(seconds, self.copy(groups * (read + output_bytes - exposed))) + exposed_seconds

    def attention(self, work: AttentionWork) -> tuple[float, float]:
        """Return the seconds at the measured rate of fused attention, else at a share of a product's.

        Fused kernels skip masked keys; unfused attention computes them and passes over all scores.
        """
        operations, scores, is_fused, length, width, share, is_wide = work
        rate = self._system.rate("fp32" if is_wide else self._half, *(3 * [operations ** (1 / 3)]))
        if is_fused:
            tiles = operations / (4 * length * width * _ATTENTION_TILE)
            # Where a window begins inside the sequence, its edge cuts tiles as that of the causal mask does.
            cut = _ATTENTION_TILE * (1 - 2 * share)
            forward, backward = (
                share
                * operations
                / (
                    attention_rate(self._system, width, share * length, tiles, cut, is_backward)
                    or _FUSED_RATE * rate
                )
                for is_backward in (False, True)
            )
            random = _RANDOM_FORWARD * forward * _RANDOM_WIDTH / width if self._drops else 0.0
            return forward + random, _FUSED_BACKWARD * backward + random
        # Scores are written, put through softmax and read.  Their gradient is written, put through softmax
        # with them, and read twice, and they once more.  Dropout reads, writes, and has a mask of a byte.
        dropping = 2.5 if self._drops else 0.0
        forward, backward = (4 + dropping) * scores, (7 + dropping) * scores
        return operations / rate + self.copy(forward), 2 * operations / rate + self.copy(backward)

    def delta_rule(self, operations: float) -> tuple[float, float]:
        """Return the seconds at a share of a product's rate."""
        forward = operations / (_DELTA_RATE * self._system.rate(self._half, *(3 * [operations ** (1 / 3)])))
        return forward, _DELTA_BACKWARD * forward

    def scan(self, operations: float, size: float) -> tuple[float, float]:
        """Return the seconds at a share of the rate of device memory, which bounds a scan's small kernels."""
        forward = size / (_SCANNED_RATE * self._system.copy_bytes_per_second)
        return forward, _SCANNED_BACKWARD * forward

    def cast(self, numbers: float, ranks: int = 1, is_normed: bool = False) -> float:
        """Return the seconds to read them, and to write them by rows and by columns, a byte for each.

        Numbers that were gathered by rows, or written so by a norm, are read again to write them by columns;
        such a norm writes a byte in the place of its own result.  It cannot where scales are of the tensor's
        blocks, or of the tensor itself, as those of NVFP4 partly are: such numbers are read once more for
        their scale, unless a norm made them, which finds the scale of FP8's.  In MXFP8 it writes them so with
        NVTE_NORM_FWD_USE_CUDNN=1 alone, which no flag sets (``rmsnorm_fwd`` in
        transformer_engine/pytorch/csrc/extensions/normalization.cpp).  From compute capability 10.0 on
        products read tensors with one scale in any layout, so nothing is written by columns
        (``nvte_is_non_tn_fp8_gemm_supported`` in transformer_engine/common/transformer_engine.cpp).

        These kernels reach a larger part of the memory's rate than others, where a system has such rates.
        """
        if not self._is_fp8:
            return 0.0
        columns = 0.0 if self._casts_once else self._operand
        from_rows = (self._operand + columns) * numbers if columns else 0.0
        if is_normed and self._norms_cast:
            return self._quantized((self._operand - self._bytes) * numbers / ranks + from_rows)
        is_read_again = self._scales_first and not (is_normed and self._norms_scale)
        read = 2 * self._bytes if is_read_again else self._bytes
        if ranks == 1:
            return self._quantized((read + self._operand + columns) * numbers)
        return self._quantized((read + self._operand) * numbers / ranks + from_rows)

    def _quantized(self, size: float) -> float:
        """Return the seconds in which kernels that cast read and write ``size`` bytes."""
        sustained = self._system.sustained
        share = sustained.get("cast", sustained.get("copy", 1.0))
        return size / (self._system.copy_bytes_per_second * share)

    def to_host(self, size: float) -> float:
        """Return the seconds on the link to the host; ValueError for a system that describes none."""
        host = self._system.host_beside_others
        if host is None:
            raise ValueError(
                f"system {self._system.name} describes no host, which --cpu-offloading-num-layers needs: "
                "give it host"
            )
        return size / host.bytes_per_second

    def addition(self, numbers: float) -> float:
        """Return the seconds to read both and to write the sums."""
        return self.copy(3 * self._bytes * numbers)

    def copy(self, size: float) -> float:
        """Return the seconds at the rate of device memory."""
        return size / (self._system.copy_bytes_per_second * self._system.sustained.get("copy", 1.0))

    def gather(self, size: float) -> float:
        """Return the seconds of the collective, with tensor-parallel ranks next to each other."""
        return self._system.gather_seconds(size, self._tensor) / self._system.sustained.get("group", 1.0)

    def gather_for_experts(self, size: float) -> float:
        """Return the seconds of the collective, with the ranks of an expert next to each other."""
        return self._system.gather_seconds(size, self._expert_tensor)

    def exposed(self, collective: float, product: float) -> float:
        """Return the whole collective, or under --tp-comm-overlap one rank's part and what is longer.

        There the product runs in as many parts as ranks, and one part is never hidden.
        """
        if not self._overlaps:
            return collective
        return max(collective - product, 0.0) + min(collective, product) / self._tensor

    def shuffle(self, size: float) -> float:
        """Return the seconds of the all-to-all, with ranks an expert's tensor-parallel size apart.

        A flexible dispatcher sends a token to each rank once.
        """
        ranks, stride = self._expert, self._expert_tensor
        if self._sends_once:
            token_bytes = size / self._routing.chosen
            return sent_once_seconds(self._system, token_bytes, self._routing, ranks, stride, self._backend)
        return self._system.all_to_all_seconds(size, ranks, stride)

    def reached(self, ranks: int) -> float:
        """Return to how many of ``ranks`` a token goes on average."""
        return self._routing.reached(ranks)

    @property
    def left_beside_exchange(self) -> float:
        """The rate of computation next to an exchange; 1 where the number of processors is unknown.

        An exchange takes processors.  Where products divide their tiles beforehand, the blocks that find
        theirs taken run after all others, so that a product takes twice as long however few are missing.
        """
        if self._system.persistent_products:
            return _SECOND_ROUND
        processors = FLEXIBLE_PROCESSORS if self._sends_once else _COLLECTIVE_PROCESSORS
        return 1 - min(1.0, processors / self._system.processors) if self._system.processors else 1.0

    def exchange(self, size: float) -> float:
        """Return the seconds of the all-to-all, with ranks a tensor-parallel size apart."""
        return self._system.all_to_all_seconds(size, self._context, self._tensor)

    def ring(self, seconds: float, size: float, results: float) -> float:
        """Return the seconds of a part for every rank, of which all but the first wait for a message.

        Parts are equally long, as Megatron deals out the causal mask (arXiv 2310.01889; Megatron's
        cp_comm_type p2p).  A message travels during the part before.
        """
        messages, part = self._context - 1, seconds / self._context
        if not messages:
            return seconds
        message = self._system.link(self._context, self._tensor).seconds(size)
        return part + messages * (max(part, message) + self.addition(results))

    def stream(self, size: float) -> float:
        """Return the seconds at the rate of device memory that large copies reach."""
        return size / (_STREAMED * self._system.copy_bytes_per_second)

    def launched(self, part: Part, kernels: float, has_routed: bool = False) -> Part:
        """Return ``part``, none of whose actions is shorter than its launches.

        A backward has two kernels for one of the forward: those of I, and fewer of W.  Graphs of whole
        iterations launch all kernels at once, others those of layers but for experts.
        """
        if self._graphs == "full_iteration" or (self._graphs != "none" and not has_routed):
            return part
        least = kernels * self._system.kernel_seconds
        return replace(
            part,
            forward_seconds=max(part.forward_seconds, least),
            input_gradient_seconds=max(part.input_gradient_seconds, 1.5 * least),
            weight_gradient_seconds=max(part.weight_gradient_seconds, 0.5 * least),
        )
