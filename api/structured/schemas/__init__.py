"""Conversion of JSON schemas of any draft to the form that the grammar library supports."""
