"""``python -m megatron_pp_ext.cli`` is ``mpp``, in the interpreter of your choice."""

from megatron_pp_ext.cli import app

app(prog_name="mpp")
