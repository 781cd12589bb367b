"""One speculative round: draft, calibrate, schedule, verify, accept; and the loop and the route around it."""
