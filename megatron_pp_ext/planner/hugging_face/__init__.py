"""Megatron's arguments for the language model that a Hugging Face ``config.json`` describes.

``config_json.py`` reads one, ``model_types.py`` is the table of what is known, and the entries of this table
are put together from the other files.  Weights are not read.
"""
