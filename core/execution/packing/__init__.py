"""Packing of the KV of an answer, and the policies that choose which tokens keep their KV."""
