"""Steps in which Megatron moves activations by modules (--fine-grained-activation-offloading)."""

import inspect
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_pp_ext.integration.core.offload_order import ProgramOffloadManager, serving
from megatron_pp_ext.integration.runners.model_stage import StepInputs
from megatron_pp_ext.runtime.plan import RankPlan


class FineGrainedOffload:
    """Has a manager for each kind of step, and one without handlers for evaluations."""

    def __init__(self) -> None:
        self._managers: dict[Hashable, ProgramOffloadManager] = {}

    @contextmanager
    def step(self, kind: Hashable, plan: RankPlan, inputs: StepInputs) -> Iterator[None]:
        """Let Megatron's layers find the manager of the step inside, if they ask for one.

        Steps of one ``kind`` have the same ``plan``.  The end of the first of them is collective over the
        job: Megatron prints what it moves.
        """
        if not inputs.config.fine_grained_activation_offloading:
            yield
            return
        if kind not in self._managers:
            first = next(iter(self._managers.values()), None)
            self._managers[kind] = ProgramOffloadManager(None if inputs.forward_only else plan.actions, first)
        manager = self._managers[kind]
        try:
            with serving(manager):
                yield
                if not inputs.forward_only:
                    manager.reset(**_groups(manager, inputs))
        except BaseException:
            del self._managers[kind]  # which is in the middle of its step
            raise


def _groups(manager: ProgramOffloadManager, inputs: StepInputs) -> dict[str, Any]:
    """Return the group by which newer releases sum up the bytes they move."""
    if "process_group" not in inspect.signature(manager.reset).parameters:
        return {}
    return {"process_group": ProcessGroupCollection.use_mpu_process_groups().tp_dp_cp}
