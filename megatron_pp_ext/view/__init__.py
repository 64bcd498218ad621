"""The output for people: tables, pictures, traces."""
