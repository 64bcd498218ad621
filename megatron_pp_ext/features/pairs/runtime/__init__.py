"""What a rank does at run time."""
