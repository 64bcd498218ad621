"""One file a schedule family, each readable beside its paper."""
