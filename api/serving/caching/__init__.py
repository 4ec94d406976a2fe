"""Fields of requests that control the prefix cache: options, breakpoints and hints."""
