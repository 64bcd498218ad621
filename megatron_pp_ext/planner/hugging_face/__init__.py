"""Megatron's arguments for the language model that a Hugging Face ``config.json`` describes.

``config_json.py`` reads one, ``model_types.toml`` is the table of what is known, and its entries are put
together from the functions of the other files.  Weights are not read.
"""
