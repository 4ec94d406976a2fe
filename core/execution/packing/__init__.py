"""Packing the KV of an answer: policies that choose which tokens keep their KV."""
