"""What clients ask of the prefix cache: breakpoints, options and hints."""
