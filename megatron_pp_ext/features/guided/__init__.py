"""Profile-guided schedules: steps that are measured, and an order that is compiled from that."""
