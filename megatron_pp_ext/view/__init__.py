"""What a person looks at: tables, pictures, traces."""
