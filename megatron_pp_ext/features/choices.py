"""What features choose where their flags leave it open.  They register here."""

from megatron_pp_ext.costs.choices.registry import register
from megatron_pp_ext.features.units import choices

register(choices.choose)
