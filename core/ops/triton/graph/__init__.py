"""A pass: what it copies to the device, and the graphs that compute it."""
