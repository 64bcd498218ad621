"""Forwards and backwards that run together, in pairs."""
