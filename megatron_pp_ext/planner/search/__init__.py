"""Which of all configurations takes the shortest step and fits."""
