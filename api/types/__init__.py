"""Types shared by the packages of the API: requests, results, sampling options, context."""
