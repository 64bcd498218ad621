"""Pipeline schedules for Megatron-LM: controllable memory, zero bubble and PipeDream behind one flag."""

__version__ = "0.1.0"
