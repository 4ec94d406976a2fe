"""Load on a server or an engine: workloads, sessions, figures, reports."""
