"""The attributes of a parameter, for another that takes its place, on this rank or on others.

Megatron and scripts write on a parameter whether it is trained, how it is cut, which ranks hold copies of it
and what the optimizer does with it.  A new parameter has to carry all of that, known here or not.
"""

import pickle
from typing import Any, NamedTuple

import torch

from megatron_pp_ext.runtime.split import has_hooks


class Marks(NamedTuple):
    """Whether a parameter is trained, and its attributes by name."""

    requires_grad: bool
    attributes: dict[str, Any]


def marks_of(parameter: torch.nn.Parameter) -> Marks:
    """Return the attributes of ``parameter``; ValueError for one that cannot be sent to another process."""
    if has_hooks(parameter):
        raise ValueError("has a gradient hook")
    for name, value in vars(parameter).items():
        try:
            pickle.dumps(value)
        except Exception as error:  # pickle raises what it likes
            raise ValueError(f"has an attribute {name!r} that cannot be sent ({error})") from error
    return Marks(parameter.requires_grad, dict(vars(parameter)))


def has_second_use(weight: torch.nn.Parameter) -> bool:
    """Return whether ``weight`` may be the embedding's or the output layer's, which can be one weight.

    The gradient of an embedding comes in I, and sums of floating-point numbers depend on their order.
    """
    marks = ("shared_embedding", "is_embedding_or_output_parameter")
    return any(getattr(weight, mark, False) for mark in marks)


def marked(data: torch.Tensor, marks: Marks) -> torch.nn.Parameter:
    """Return a parameter of these numbers that carries ``marks``."""
    parameter = torch.nn.Parameter(data, requires_grad=marks.requires_grad)
    for name, value in marks.attributes.items():
        setattr(parameter, name, value)
    return parameter


def half_frozen(name: str, state: str) -> str:
    """Return the error about copies or parts of the weight ``name`` of which some are frozen."""
    return (
        f"{name} is {state}, and these are copies or parts of one weight; freeze all of them, under tied "
        "embeddings also that of the output layer, or none"
    )
