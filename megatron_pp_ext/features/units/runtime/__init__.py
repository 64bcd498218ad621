"""Keys and values of a sequence, which the attention of its later slices reads.

torch only: nothing here knows Megatron.
"""
