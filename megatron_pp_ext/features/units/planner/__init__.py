"""What slices change in the estimates of steps."""
