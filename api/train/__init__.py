"""Training on the engine's own values: rollouts, losses with torch's gradient, and adapters.

The package needs nothing but foretoken's own dependencies. Trainers import its files directly.
"""
