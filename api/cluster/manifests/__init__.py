"""Manifests of ``foretoken deploy``: replicas on Ray Serve or KubeRay, whole servers for llm-d.

None of them was applied to a cluster. Tests compare the Serve config and the core kinds with their
schemas, and the custom kinds with the fields that their references require.
"""
