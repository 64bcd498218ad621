"""All features, in the order that matters: each changes what those before it have made.

That is the order of passes: copies to the host are planned for the actions that there are, those of a split
head included, and slices are cut from the whole order.  Two methods stand for another order than this one:
``Feature.completed`` comes after all passes, and ``Feature.data_parts`` before all ``Feature.step_parts``.
"""

from megatron_pp_ext.features.feature import Feature
from megatron_pp_ext.features.guided.feature import Guided
from megatron_pp_ext.features.offload.feature import Offloading
from megatron_pp_ext.features.pairs.feature import Pairing
from megatron_pp_ext.features.units.feature import UnitPlanning
from megatron_pp_ext.features.vocabulary.feature import VocabularyParallelism

FEATURES: list[Feature] = [Pairing(), VocabularyParallelism(), Offloading(), UnitPlanning(), Guided()]
"""The features of this package, and those that were added from elsewhere."""


def add(feature: Feature) -> None:
    """Add a ``feature`` of another package, before Megatron reads its flags; it comes after all others.

    ValueError where its name is taken.
    """
    if any(feature.name == other.name for other in FEATURES):
        raise ValueError(f"there is a feature {feature.name!r} already: give this one another name")
    FEATURES.append(feature)
