"""The costs of a part of a model on one rank for one microbatch: operations, seconds, bytes, parameters."""

from dataclasses import dataclass, replace
from typing import Self

from megatron_pp_ext.schedule.costs import SequenceMemory, StageCosts


@dataclass(frozen=True, slots=True)
class Matrices:
    """A rank's weights in matrices of layers, ``parameters`` in all; experts' are not among them.

    An iteration in which Muon makes them orthogonal takes ``operations``, an iteration for experts takes
    ``expert_operations``, and for the largest matrix of either kind ``largest`` alone.
    """

    parameters: float
    operations: float
    expert_operations: float
    largest: float

    def __add__(self, other: "Matrices") -> "Matrices":
        return Matrices(
            self.parameters + other.parameters,
            self.operations + other.operations,
            self.expert_operations + other.expert_operations,
            max(self.largest, other.largest),
        )

    def times(self, count: float) -> "Matrices":
        """Return ``count`` such matrices."""
        return Matrices(
            count * self.parameters, count * self.operations, count * self.expert_operations, self.largest
        )


@dataclass(slots=True)
class Part:
    """Operations, seconds, bytes and parameters of a part of the model; the costs of parts can be added.

    A product with a weight costs the same operations in F, I and W; a product of activations, such as
    attention's, costs double in I and nothing in W.  A recomputed part runs its forward again in I.
    Seconds come from ``KernelSeconds``; they include copies and messages, which have no operations.  A
    backward that is not split takes ``overlapped_in_whole`` less than I and W, since collectives of I run
    while W computes; it gathers nothing again, but in I what an I leaves to W.
    W gathers for ``gathering`` seconds during its products, and at its start for ``first_gathering``, since
    no product is before that.  ``lent_seconds`` belong to row-parallel products, which W lends to an I
    (``schedule.timing``), and ``hidden_beside`` the part of an I's column-parallel messages that they hide.
    ``exchanged_seconds`` are the time of one exchange of tokens between experts; a forward has two, and
    an I two.  A forward and a backward that run together (``Schedule.paired``) take ``overlapped_together``
    less than one after the other.  Such halves take turns by layer, of which the largest keeps
    ``of_layer`` bytes between F and I.

    ``after_forward`` are the bytes kept between F and I, ``after_input_gradient`` those between I and W:
    input and output gradient of every product with a weight.  ``workspace`` are the temporary bytes inside I
    besides the latter, ``workspace_in_whole`` those inside a backward that is not split.  ``stored``,
    ``owed``, ``replaced``, ``expanded`` and ``masks`` are bytes of a microbatch in slices
    (``SequenceMemory``).

    ``parameters`` and ``expert_parameters`` are numbers of weights; the latter are divided among
    expert-parallel ranks.  ``fp8_parameters`` are the ones of either kind that products read in FP8.
    ``matrices`` are the weight matrices of layers, for an optimizer that treats them apart, else None.

    Nobody changes a part, but a search makes millions, which would take twice as long if they were frozen.
    """

    weight_operations: float = 0.0
    activation_operations: float = 0.0
    repeated_operations: float = 0.0
    forward_seconds: float = 0.0
    input_gradient_seconds: float = 0.0
    weight_gradient_seconds: float = 0.0
    overlapped_in_whole: float = 0.0
    after_forward: float = 0.0
    after_input_gradient: float = 0.0
    workspace: float = 0.0
    workspace_in_whole: float = 0.0
    parameters: float = 0.0
    expert_parameters: float = 0.0
    fp8_parameters: float = 0.0
    exchanged_seconds: float = 0.0
    overlapped_together: float = 0.0
    gathering: float = 0.0
    first_gathering: float = 0.0
    lent_seconds: float = 0.0
    hidden_beside: float = 0.0
    stored: float = 0.0
    owed: float = 0.0
    replaced: float = 0.0
    expanded: float = 0.0
    masks: float = 0.0
    of_layer: float = 0.0
    matrices: Matrices | None = None

    def __add__(self, other: "Part") -> "Part":
        return Part(
            self.weight_operations + other.weight_operations,
            self.activation_operations + other.activation_operations,
            self.repeated_operations + other.repeated_operations,
            self.forward_seconds + other.forward_seconds,
            self.input_gradient_seconds + other.input_gradient_seconds,
            self.weight_gradient_seconds + other.weight_gradient_seconds,
            self.overlapped_in_whole + other.overlapped_in_whole,
            self.after_forward + other.after_forward,
            self.after_input_gradient + other.after_input_gradient,
            # Parts are recomputed one after the other.
            max(self.workspace, other.workspace),
            max(self.workspace_in_whole, other.workspace_in_whole),
            self.parameters + other.parameters,
            self.expert_parameters + other.expert_parameters,
            self.fp8_parameters + other.fp8_parameters,
            self.exchanged_seconds + other.exchanged_seconds,
            self.overlapped_together + other.overlapped_together,
            self.gathering + other.gathering,
            max(self.first_gathering, other.first_gathering),
            self.lent_seconds + other.lent_seconds,
            self.hidden_beside + other.hidden_beside,
            self.stored + other.stored,
            self.owed + other.owed,
            self.replaced + other.replaced,
            self.expanded + other.expanded,
            self.masks + other.masks,
            max(self.of_layer, other.of_layer),
            self.matrices + other.matrices
            if self.matrices and other.matrices
            else self.matrices or other.matrices,
        )

    def times(self, count: float) -> "Part":
        """Return the costs of ``count`` such parts, one after the other."""
        if not count:
            return Part()
        return Part(
            count * self.weight_operations,
            count * self.activation_operations,
            count * self.repeated_operations,
            count * self.forward_seconds,
            count * self.input_gradient_seconds,
            count * self.weight_gradient_seconds,
            count * self.overlapped_in_whole,
            count * self.after_forward,
            count * self.after_input_gradient,
            self.workspace,
            self.workspace_in_whole,
            count * self.parameters,
            count * self.expert_parameters,
            count * self.fp8_parameters,
            count * self.exchanged_seconds,
            count * self.overlapped_together,
            count * self.gathering,
            self.first_gathering,
            count * self.lent_seconds,
            count * self.hidden_beside,
            count * self.stored,
            count * self.owed,
            count * self.replaced,
            count * self.expanded,
            count * self.masks,
            self.of_layer,
            self.matrices and self.matrices.times(count),
        )

    def repeated(self, count: float) -> "Part":
        """Return the costs of ``count`` such parts, one after the other, that share their weights."""
        return replace(
            self.times(count),
            parameters=self.parameters,
            expert_parameters=self.expert_parameters,
            fp8_parameters=self.fp8_parameters,
            matrices=self.matrices,
        )

    def without(self, other: "Part") -> "Part":
        """Return this part with less to keep, by what ``other``, a part of it, keeps for itself.

        Its temporary bytes are the largest of any part: they are the other's where that one has as many.
        """
        after_forward = max(0.0, self.after_forward - other.after_forward)
        has_workspace = self.workspace > other.workspace or self.workspace_in_whole > other.workspace_in_whole
        return replace(
            self,
            after_forward=after_forward,
            after_input_gradient=max(0.0, self.after_input_gradient - other.after_input_gradient),
            workspace=self.workspace if has_workspace else 0.0,
            workspace_in_whole=self.workspace_in_whole if has_workspace else 0.0,
        )

    def most_kept(self, is_split: bool) -> float:
        """Return the most bytes at one time, from the forward to the end of a backward that may be split."""
        if is_split:
            return max(self.after_forward, self.after_input_gradient + self.workspace)
        return self.after_forward + self.workspace_in_whole

    @property
    def forward_operations(self) -> float:
        """The operations of one forward."""
        return self.weight_operations + self.activation_operations

    @property
    def backward_seconds(self) -> float:
        """The seconds of both halves of the backward, one after the other."""
        return self.input_gradient_seconds + self.weight_gradient_seconds

    @property
    def undivided(self) -> Self:
        """The costs where I computes the gradients of weights too, and leaves nothing to W."""
        return replace(
            self,
            input_gradient_seconds=self.backward_seconds - self.overlapped_in_whole,
            weight_gradient_seconds=0.0,
            overlapped_in_whole=0.0,
            gathering=0.0,
            first_gathering=0.0,
            lent_seconds=0.0,
            hidden_beside=0.0,
            after_input_gradient=0.0,
        )

    @property
    def exposed_gathering(self) -> float:
        """The seconds that a W waits for gathered operands."""
        return max(0.0, self.gathering - self.weight_gradient_seconds) + self.first_gathering

    def measured(self, stage: StageCosts, overlapped_together: float) -> Self:
        """Return the part with the seconds and bytes of ``stage``, which was measured."""
        return replace(
            self,
            forward_seconds=stage.forward,
            input_gradient_seconds=stage.input_gradient,
            weight_gradient_seconds=stage.weight_gradient,
            overlapped_in_whole=stage.hidden,
            gathering=0.0,
            first_gathering=0.0,
            lent_seconds=stage.lent,
            hidden_beside=stage.hidden_beside,
            overlapped_together=overlapped_together,
            after_forward=stage.activation,
            of_layer=stage.activation,
            after_input_gradient=stage.activation - stage.released_by_input_gradient,
            workspace=stage.workspace and stage.workspace + max(0.0, stage.released_by_input_gradient),
            workspace_in_whole=stage.workspace_in_whole,
        )

    def recomputed(self, after_forward: float) -> Self:
        """Return the costs if only ``after_forward`` bytes outlive the forward, which is repeated for I."""
        return replace(
            self,
            repeated_operations=self.forward_operations,
            input_gradient_seconds=self.input_gradient_seconds + self.forward_seconds,
            after_forward=after_forward,
            workspace=max(0.0, self.after_forward - self.after_input_gradient),
            workspace_in_whole=self.after_forward,
            replaced=0.0,
            expanded=0.0,
            masks=0.0,
        )

    @property
    def sequence(self) -> SequenceMemory:
        """The memory that slices of a microbatch share, as a schedule takes it."""
        return SequenceMemory(self.stored, self.owed, self.replaced, self.expanded, self.masks)

    def costs(self) -> StageCosts:
        """Return the costs as a schedule takes them."""
        released = self.after_forward - self.after_input_gradient
        growth = max(0.0, self.workspace - released)
        exposed = self.exposed_gathering
        return StageCosts(
            forward=self.forward_seconds,
            input_gradient=self.input_gradient_seconds,
            weight_gradient=self.weight_gradient_seconds + exposed,
            activation=self.after_forward,
            released_by_input_gradient=released,
            parameters=self.parameters,
            expert_parameters=self.expert_parameters,
            hidden=max(0.0, self.overlapped_in_whole + exposed),
            workspace=growth - max(0.0, -released),
            workspace_in_whole=self.workspace_in_whole,
            lent=self.lent_seconds,
            hidden_beside=self.hidden_beside,
        )
