"""The version of this package, and the extra with which it trains."""

VERSION = "0.2.0"


def needs(module: str) -> str:
    """Return what to do where ``module``, a part of what training needs, is not installed; else "".

    Planning needs neither torch nor Megatron, and so they come with an extra.
    """
    package = {"torch": "torch", "megatron": "megatron-core"}.get(module)
    return f"{package} is not installed: pip install 'megatron_pp_ext[train]'" if package else ""
