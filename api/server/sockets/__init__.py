"""WebSockets: /v1/responses over a connection that stays open."""
