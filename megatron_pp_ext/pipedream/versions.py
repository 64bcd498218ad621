"""Weight stashing: keeps the versions of a stage's weights that microbatches in flight still use.

The newest weights stay where the optimizer knows them.  A copy of an older version is kept for as long
as some microbatch needs it.  To compute with an old version its tensors take the place of
the parameters' own (``Parameter.data``), which moves no data.

Autograd keeps weights for the backward as well, and refuses to use them once the optimizer has
written to them.  Inside ``using`` it therefore keeps a reference to the parameter instead of its numbers,
and the backward finds the numbers of the version that is in place when it runs.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from megatron_pp_ext.runtime.activation_meter import ActivationMeter, watching
from megatron_pp_ext.runtime.rank import Stage


class _Reference(NamedTuple):
    """Stands in the autograd graph for a tensor that lies ``offset`` elements into a parameter."""

    parameter: torch.nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class WeightVersions:
    """The versions of the ``parameters`` that need a gradient; the others never change."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.newest = 0
        self._kept: dict[int, list[torch.Tensor]] = {}

    @property
    def bytes_of_one(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters)

    @property
    def kept_bytes(self) -> int:
        """The bytes of all versions but the newest."""
        return sum(tensor.nbytes for version in self._kept.values() for tensor in version)

    @property
    def kept(self) -> list[int]:
        """The versions that are kept in addition to the newest, oldest first."""
        return sorted(self._kept)

    @contextmanager
    def using(self, version: int) -> Iterator[None]:
        """Compute a forward or a backward with ``version`` of the weights; KeyError if it was not kept."""
        data = self._own()
        self._put(self._data(version, data))
        references = _References(self.parameters, watching())
        try:
            with torch.autograd.graph.saved_tensors_hooks(references.pack, references.unpack):
                yield
        finally:
            self._put(data)

    def update_follows(self, still_needed: Iterable[int]) -> None:
        """Keep the versions that are ``still_needed`` after the update that the optimizer is about to make.

        ``still_needed`` may name the newest version and older ones; all others are released.
        """
        versions = set(still_needed)
        for version in self._kept.keys() - versions:
            del self._kept[version]
        if self.newest in versions:
            self._keep_newest()
        self.newest += 1

    def _data(self, version: int, newest: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the data of the weights under ``version``, where ``newest`` is the parameters' data."""
        return newest if version == self.newest else self._kept[version]

    def _keep_newest(self) -> None:
        self._kept[self.newest] = [data.clone() for data in self._own()]

    def _own(self) -> list[torch.Tensor]:
        return [parameter.data for parameter in self.parameters]

    def _put(self, data: list[torch.Tensor]) -> None:
        for parameter, numbers in zip(self.parameters, data, strict=True):
            parameter.data = numbers


class VersionedStage:
    """Runs ``stage`` with version ``version_of(microbatch)`` of its weights."""

    def __init__(self, stage: Stage, versions: WeightVersions, version_of: Callable[[int], int]) -> None:
        self.stage, self.versions, self.version_of = stage, versions, version_of

    def forward(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        with self.versions.using(self.version_of(microbatch)):
            return self.stage.forward(microbatch, activation)

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        with self.versions.using(self.version_of(microbatch)):
            return self.stage.backward(microbatch, gradient)

    def backward_input(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        with self.versions.using(self.version_of(microbatch)):
            return self.stage.backward_input(microbatch, gradient)

    def backward_weight(self, microbatch: int) -> None:
        """See ``rank.Stage``; a weight's own gradient does not depend on its version."""
        self.stage.backward_weight(microbatch)


class _References:
    """Autograd hooks that recognise weights among saved tensors by where their numbers lie at the moment."""

    def __init__(self, parameters: list[torch.nn.Parameter], meter: ActivationMeter | None) -> None:
        self._keep_other = meter.pack if meter else lambda tensor: tensor
        self._sorted = sorted(parameters, key=torch.Tensor.data_ptr)
        self._starts = [parameter.data_ptr() for parameter in self._sorted]

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return the object that autograd keeps for ``tensor``: a reference if it is a weight."""
        position = bisect_right(self._starts, tensor.data_ptr()) - 1
        if position < 0:
            return self._keep_other(tensor)
        parameter, beyond = self._sorted[position], tensor.data_ptr() - self._starts[position]
        if beyond >= parameter.nbytes:
            return self._keep_other(tensor)
        return _Reference(parameter, tensor.shape, tensor.stride(), beyond // parameter.element_size())

    @staticmethod
    def unpack(saved: Any) -> torch.Tensor:
        """Return the tensor for the backward; a whole parameter is returned itself, with its attributes."""
        if isinstance(saved, torch.Tensor):
            return saved
        if not isinstance(saved, _Reference):
            return ActivationMeter.unpack(saved)
        parameter = saved.parameter
        if saved.shape == parameter.shape and saved.stride == parameter.stride():
            return parameter
        data = parameter.data
        return data.as_strided(saved.shape, saved.stride, data.storage_offset() + saved.offset)
