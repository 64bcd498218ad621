"""Weights that go ahead of the optimizer by as many updates as their gradients will come late.

Where update t changes the weights by u(t), a microbatch does not compute with w(t) but with w(t) + d u(t),
the point to which d more updates like the last one would lead.  For d = 1 that point moves by
2 u(t) - u(t - 1) in an update: by the late update and by its error, the difference to the one before, which
stood in for it.  This is the correction by error feedback of arXiv 2606.30634, for any optimizer.  For larger
d it is a prediction of weights as SpecTrain's (arXiv 1809.02839).

The parameters stay the optimizer's own w(t); evaluations and checkpoints use these.
"""

from collections.abc import Iterable

import torch

from megatron_pp_ext.runtime.versions import WeightVersions


class LookAheadVersions(WeightVersions):
    """Versions of the ``parameters``, each ``updates`` >= 1 updates ahead; version 0, before any, is not.

    They take the memory of one more version than ``WeightVersions``: the newest is not the optimizer's.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], updates: int) -> None:
        super().__init__(parameters)
        self.updates = updates
        self._is_ahead = True

    def update_follows(self, still_needed: Iterable[int]) -> None:
        """See ``WeightVersions``; the weights before the update are kept until the point ahead is known."""
        self._go_ahead(self._own())
        before = [data.clone() for data in self._own()]
        super().update_follows(still_needed)
        self._kept[self.newest] = before
        self._is_ahead = False

    def _data(self, version: int, own: list[torch.Tensor]) -> list[torch.Tensor]:
        self._go_ahead(own)
        return self._kept[version] if version in self._kept else super()._data(version, own)

    def _go_ahead(self, own: list[torch.Tensor]) -> None:
        """Move the newest version ahead, once the optimizer has made the update that leads to it."""
        if self._is_ahead:
            return
        for before, now in zip(self._kept[self.newest], own, strict=True):
            torch.add(now, torch.sub(now, before, out=before), alpha=self.updates, out=before)
        self._is_ahead = True

    def _keep_newest(self) -> None:
        if self.newest not in self._kept:
            super()._keep_newest()
