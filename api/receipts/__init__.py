"""Receipts: signed statements of which model gave an answer, with which parameters and seed."""
