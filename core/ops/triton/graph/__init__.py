"""A pass: its inputs on the device, and the graphs that compute it."""
