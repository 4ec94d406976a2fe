"""Verification of recorded answers: is an answer the one that the model gives with this seed?"""
