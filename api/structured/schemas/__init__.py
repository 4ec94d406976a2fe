"""JSON schemas as others write them, as the grammar library takes them."""
