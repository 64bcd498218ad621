"""The compiler: the best order for given costs and memory, and the maker of every schedule.  Pure Python."""
