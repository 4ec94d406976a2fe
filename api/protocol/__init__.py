"""Fields of bodies and parts of answers that every API has."""
