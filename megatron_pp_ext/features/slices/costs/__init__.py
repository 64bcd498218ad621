"""What slices of a model's sequences take, from the costs of its layers, and the choice of their length."""
