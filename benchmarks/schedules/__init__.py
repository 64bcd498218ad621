"""How good are compiled schedules?  Everything here is simulated; one core is enough."""
