"""Code that several benchmarks share: machine, rooflines, shapes, tables, JSON."""
